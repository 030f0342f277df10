"""Writes docs/recipe.md from the sections of the recipe: `python docs/generate.py`.

With `--check` it writes nothing, and exits with 1 if the page is not up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from meshtune.config import reference
from meshtune.recipes.recipe import Recipe

PAGE = Path(__file__).with_name("recipe.md")

INTRODUCTION = """\
<!-- Written by docs/generate.py from the code; edit the descriptions of the fields there. -->

# Recipe reference

Every key of a recipe. A recipe is a YAML file of sections; only `model.name`, `data.train_path` and
`training.learning_rate` have to be written:

```yaml
# smallest.yaml
model:
  name: HuggingFaceTB/SmolLM2-135M-Instruct
data:
  train_path: data/train.jsonl
training:
  learning_rate: 1e-5
```

How values are read:

- Any key can be overridden on the command line: `section.key=value`, the value as it would stand in the file.
  `section.list.0=value` addresses an item of a list that the recipe writes.
- An unknown or misplaced key, a value of another type, or a combination without effect is an error that names file,
  line, key, what was found and what is wanted. All are listed at once.
- The field decides the type: `1e-5` is a number, and `no` or `010` in a text field stays text. `0` and `false` are
  values, not absences.
- `null` stands where the type allows it, and means not set: `max_grad_norm: null` does not clip. A setting that applies
  only in some mode is not set by default, and setting it where it has no effect is an error.
- `${section.key}` puts another setting in, `${env:NAME}` an environment variable, `$${` is a literal `${`.
- `base` names recipes to start from; what is written here is laid over them, key by key.
- Nothing in a recipe imports or runs code, but for `model.trust_remote_code: true`, which runs that of the model's
  repository.

`meshtune init NAME` writes a recipe with these descriptions as comments; `meshtune schema` prints them as JSON Schema
for editors.

"""


def render() -> str:
    """The whole page."""
    return INTRODUCTION + reference(Recipe)


def main(arguments: list[str]) -> int:
    """Write or check the page; returns the exit code."""
    page = render()
    if arguments == ["--check"]:
        current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if current != page:
            print(f"{PAGE} is not up to date; run: python docs/generate.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
