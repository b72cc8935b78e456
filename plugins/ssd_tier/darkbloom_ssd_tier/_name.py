"""What the tier is called, in a file of its own: commands need no more of it to show their help."""

NAME = "ssd-tier"
