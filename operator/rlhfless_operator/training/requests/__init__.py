"""Requests to the instances: `builder` makes them, `tasks` sends one and tries it again."""
