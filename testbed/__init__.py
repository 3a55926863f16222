"""SGLang's real engine on a machine without a GPU: see README.md in this folder."""
