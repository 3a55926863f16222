"""Wait until an SGLang server really serves, and know when it never will."""
