"""Which of our hooks goes on which touch point, process by process; `plugin` says when.

Each module holds the table of its process (touch point to hook), the hooks that are in no other
part of the package, and what binds them.
"""
