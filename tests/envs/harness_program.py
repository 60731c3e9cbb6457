"""An agent as a program of its own, with the standard library only; what it does is in its task."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

TOOLS = [{"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}]
ESCAPE = "import os, time; open('{path}', 'w').write(str(os.getpid())); time.sleep(600)"


def ask(messages: list[Any]) -> dict[str, Any]:
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": TOOLS}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        answered: dict[str, Any] = json.load(response)["choices"][0]["message"]
    return answered


def main() -> None:
    task = json.loads(Path(os.environ["PEARL_TASK"]).read_text())
    kind = task["kind"]
    if kind == "silent":
        sys.exit("nothing to do")
    messages: list[Any] = [{"role": "user", "content": f"Guess: {kind}."}]
    for _ in range(task.get("calls", 1)):
        try:
            messages += [ask(messages), {"role": "user", "content": "Again."}]
        except urllib.error.HTTPError as error:
            sys.stdout.write(f"refused: {error.read().decode()}")
            sys.stdout.flush()
            if kind == "stubborn":
                time.sleep(600)
            sys.exit(3)
    if kind == "edits":
        messages[0]["content"] = "Something else."
        ask(messages)
    while kind == "repeats":
        try:
            ask([{"role": "user", "content": "Something else."}])
        except urllib.error.HTTPError:
            time.sleep(0.01)
    if kind == "escapes":
        path = Path(task["path"])
        subprocess.Popen([sys.executable, "-c", ESCAPE.format(path=path)], env={}, start_new_session=True)
        while not path.exists() or not path.read_text():
            time.sleep(0.01)
    if kind == "waits":
        time.sleep(600)
    Path("answer.txt").write_text(str(messages[1]["content"]))
    sys.stdout.write("done")


if __name__ == "__main__":
    main()
