"""The cases, how they are timed, and the processes that do it."""
