import sys
from pathlib import Path

# The fixtures module sits beside the tests; importlib mode does not put this folder on the path by itself.
sys.path.insert(0, str(Path(__file__).parent))
