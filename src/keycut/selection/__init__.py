"""Which channels stay: one file per method."""

# The file of each method, named rather than imported: the code behind a selection is then that of
# its own method, and a change to one reruns that one alone.
FILES = {
    "l1": "l1",
    "rand": "rand",
    "s_wanda": "s_wanda",
    "grad": "grad",
    "drrqr": "drrqr",
    "qrcp": "drrqr",
    "pca_proper": "pca",
    "pca_adversarial": "pca",
}


def module(method: str) -> str:
    return f"keycut.selection.{FILES[method]}"
