"""Entry points, one per job. Only here argv and the environment are read, and only here the process exits."""
