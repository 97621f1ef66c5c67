"""Mends a drafter that nearly fits its target, into a new folder: rows, tokenizer, template, special ids.

draftsmith repair ./target ./drafter out=drafter-repaired
draftsmith repair TARGET DRAFTER out=… quiet_padding=true --dry-run
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # launched by path: sys.path[0] is recipes/, where `import distill` would find a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pairing.files import require_outside
from pairing.repair import plan_repair, repair
from pairing.source import resolve
from recipes.config import Strict, guarded, parse

SHOWN = 20  # initialised tokens that are listed on a terminal; pair.json and --json hold all


class RepairConfig(Strict):
    target: str
    """the target: a hub id, a folder or a .gguf file"""
    draft: str
    """the drafter: the same"""
    out: Path
    """folder of the mended drafter; must be new or empty"""
    quiet_padding: bool = False
    """also settles the drafter's own rows that no token uses, so that they are not drafted; kept as they are otherwise"""


def run(config: RepairConfig, dry: bool = False) -> dict[str, Any]:
    target, drafter = resolve(config.target), resolve(config.draft)
    require_outside(config.out, target.path, drafter.path)
    if dry:
        plan = plan_repair(target, drafter, config.quiet_padding)
        plan.pop("sources")
        return {"drafter": drafter.name, "target": target.name, "out": str(config.out), **plan}
    return repair(target, drafter, config.out, config.quiet_padding)


def main(argv: list[str]) -> int:
    about = "Mends a drafter that nearly fits its target."
    config, args = parse(RepairConfig, argv, positional=("target", "draft"), about=about)
    result = run(config, args.dry_run)
    if args.json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    elif result["blocks"]:
        print(f"no repair reaches {result['drafter']}: {'; '.join(result['blocks'])}")
    elif not result["needed"]:
        print(f"nothing to do: {result['drafter']} fits {result['target']}; nothing written")
    else:
        old, new = result["rows"]
        print(f"{'would write' if args.dry_run else 'wrote'} {result['out']}: {old} rows to {new}")
        for mend in result["mends"]:
            print(f"  mended: {mend}")
        made = result["initialised"]
        for row in made[:SHOWN]:
            of = " + ".join(map(repr, row["of"])) or "all real rows"
            print(f"  initialised, needs training: {row['id']} {row['token']!r} from {of} ({row['how']})")
        if len(made) > SHOWN:
            print(f"  and {len(made) - SHOWN} more: see initialised in pair.json")
    return 1 if result["blocks"] else 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
