"""Makes the goldens of the installed jax anew and prints which changed: `python -m tests.golden.renew`.

A name renews the programs and documents whose name, or kind of document, contains that text: "plans" renews
all plans. Without one, all are made.
"""

import argparse
import warnings

# Sets the platform and the number of devices before jax starts.
import tests.conftest  # noqa: F401
from tests.golden import store
from tests.golden.documents import DOCUMENTS, document
from tests.golden.programs import PROGRAMS, lowered
from tests.golden.text import digest, stable_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; none for all")
    wanted = parser.parse_args().names

    def chosen(name: str, stored: dict, kind: str = "") -> bool:
        return name not in stored or not wanted or any(part in name or part in kind for part in wanted)

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "(nothing-offloaded|offload-not-done):")  # as their tests
    changed = 0
    old = store.index()
    programs = {}
    for name in PROGRAMS:
        programs[name] = stable_text(lowered(name)) if chosen(name, old) else store.texts()[name]
        changed += _tell(name, name in old, name in old and old[name]["sha256"] == digest(programs[name]))
    changed += _tell_removed(old, programs)
    store.store(programs)
    for kind, makers in DOCUMENTS.items():
        stored = store.documents(kind)
        found = {}
        for name in makers:
            if not chosen(name, stored, kind):
                found[name] = stored[name]
                continue
            made = document(kind, name)
            same = name in stored and store.document_difference(kind, name, made) is None
            found[name] = stored[name] if same else made
            changed += _tell(f"{kind}: {name}", name in stored, same)
        changed += _tell_removed(stored, found)
        store.store_documents(kind, found)
    print(f"{changed} changed, {len(programs) + sum(map(len, DOCUMENTS.values()))} in all")


def _tell(name: str, known: bool, same: bool) -> int:
    if same:
        return 0
    print(f"{'changed' if known else 'new'}: {name}", flush=True)
    return 1


def _tell_removed(old: dict, new: dict) -> int:
    removed = sorted(old.keys() - new.keys())
    for name in removed:
        print(f"removed: {name}")
    return len(removed)


if __name__ == "__main__":
    main()
