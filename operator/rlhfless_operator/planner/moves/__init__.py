"""When unfinished samples move between actors, and when they switch to newer weights."""
