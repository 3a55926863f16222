"""What measures and draws the figures of README and docs; no part of the installed package."""
