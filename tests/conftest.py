import sys
from pathlib import Path

from hypothesis import settings

# The same examples in every run, and no limit of time for one: other work may slow the machine.
settings.load_profile("ci")

# The modules that tests share stand beside them.
sys.path.insert(0, str(Path(__file__).parent))
