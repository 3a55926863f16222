"""What a patched SGLang says where the package that its seams call, or a diff, is not there."""

WHAT = (
    "import sglang stops with one sentence where the sglang_spec_ext package is missing, or a diff"
    " that the flag needs"
)
WHY = (
    "The seams of the other diffs import sglang_spec_ext. In an environment that has lost it, or"
    " never had it, the first of them would end in a bare ModuleNotFoundError of whatever process"
    " came first, with nothing that says what to do. And where only some diffs are applied, the"
    " flag would be unknown to the command line, or be taken and have half of its effect."
)
UPSTREAM = "none"
RETIRE = "with the last of the other diffs, except kimi_k25, which needs no package"

CHECK = """
try:
    import sglang_spec_ext.seams as _seams
except ImportError as _error:
    raise ImportError(
        "this SGLang is patched to call sglang_spec_ext, which cannot be imported here: either "
        "pip install sglang-spec-ext, or take the patches back with apply_patches.py revert"
    ) from _error
_seams.require_all()
del _seams
"""

FILE = "sglang/__init__.py"
FIRST_LINE = {"file": FILE, "anchor": "# SGLang public APIs\n", "insert_after": CHECK}

EDITS = {
    "0.5.9": [FIRST_LINE],
    "0.5.10.post1": [FIRST_LINE],
    "0.5.12.post1": [FIRST_LINE],
    "0.5.23": [{**FIRST_LINE, "anchor": '"""SGLang public API."""\n'}],
}
