"""One page on an installation and a running server, fit to paste into a bug report."""
