"""The instances of a job: how many it holds (`capacity`), who has which, gangs, and how weights reach them."""
