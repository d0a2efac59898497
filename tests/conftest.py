import sys
from pathlib import Path

# The modules that tests share stand beside them.
sys.path.insert(0, str(Path(__file__).parent))
