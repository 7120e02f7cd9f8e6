# SPDX-License-Identifier: Apache-2.0
"""Objects of the core that `__new__` made without `__init__`: whatever is asked of one is an error, no crash."""

import json
import subprocess
import sys

import breccia._core as core
import pytest

CLASSES = sorted(name for name, value in vars(core).items() if isinstance(value, type))

# In a process of its own, which a crash ends alone. Calls whatever there is with such an object, and prints what was
# no error.
PROGRAM = """
import json, sys
from breccia import _core

kind = getattr(_core, sys.argv[1])
subclass = type("Derived", (kind,), {})
made = {"new": kind.__new__(kind), "derived": subclass.__new__(subclass)}
asked, answered, refused = 0, [], (RuntimeError, TypeError, ValueError)

def ask(what, call, errors):
    global asked
    asked += 1
    try:
        answer = call()
        if answer is not NotImplemented:  # of operators, called with as many as they do not take
            answered.append(f"{what}: {answer!r}")
    except errors:
        pass
    except Exception as error:
        answered.append(f"{what}: {type(error).__name__}: {error}")

for how, unmade in made.items():
    for name, value in vars(kind).items():
        if isinstance(value, property):
            ask(f"{how}.{name}", lambda: value.fget(unmade), RuntimeError)
        elif callable(value) and (not name.startswith("__") or name in ("__enter__", "__exit__", "__eq__")):
            for count in range(4):
                ask(f"{how}.{name}/{count}", lambda: value(unmade, *[unmade] * count), refused)
    for name, function in vars(_core).items():
        if callable(function) and not isinstance(function, type):
            for count in range(1, 6):
                ask(f"{name}({how})/{count}", lambda: function(*[unmade] * count), refused)
print(json.dumps({"asked": asked, "answered": answered}))
"""


@pytest.mark.parametrize("name", CLASSES)
def test_what_new_alone_has_made_is_refused(name):
    done = subprocess.run([sys.executable, "-c", PROGRAM, name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    found = json.loads(done.stdout)
    assert found["asked"] > 100
    assert found["answered"] == []


def test_the_message_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"must be made by calling its class: its __init__\(\) has not run"):
        _ = core.ScaledTensor.__new__(core.ScaledTensor).T
