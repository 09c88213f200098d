"""sm90 kernels in which every lane arrives on an mbarrier where one arrives for its warp.

racecheck counts only an arriving thread's own accesses as handed over (handovers.cu), so it takes
every hand-over by an elected lane for a race, whatever __syncwarp stands before it. With this
change it can follow them: what it then still finds has another cause. What is handed over, and
when, stays.
"""

from __future__ import annotations

import re

WARP = 32
ELECTED = re.compile(
    r"if \((?P<rest>[^;{]*?)(?: && )?"
    r"(?:(?:[\w.]*\blane|thread % 32) (?P<how>==|<) (?P<lanes>\d)|first_lane)\)"
    r"(?P<open>\s*\{?\s*)(?P<arrive>mbar_arrive\([^;]*\);)"
)
LEFT = re.compile(r"if \([^;{]*(?:lane|% 32)[^;{]*\)\s*\{?\s*mbar_arrive\(")
"""An arrival that is still some lanes' alone."""
INIT = re.compile(r"mbar_init\((?P<bar>[^;]*), (?P<count>[^,;]+)\);")
BY_THREADS = ("1", "kGroup", "kRoleThreads", "kFullArrivals", "kLanes")
"""Counts of barriers on which threads arrive for themselves; of kFullArrivals, a warp has PART."""
PART = "kFactorsArrive = 1;"
BY_WARPS = re.compile(r"(\d|kRowGroups|kConvertGroups|[ *+()])+")
"""Counts of barriers on which a lane arrives for its warp."""


def every_lane(source: str) -> str:
    """The source with all lanes arriving, and the barriers' counts to match."""

    def arrive(found: re.Match[str]) -> str:
        lanes = int(found["lanes"]) if found["how"] == "<" else 1
        condition = f"if ({found['rest']}) " if found["rest"] else ""
        return (
            condition
            + found["open"]
            + ("{ " + found["arrive"] * lanes + " }" if lanes > 1 else found["arrive"])
        )

    def init(found: re.Match[str]) -> str:
        if found["count"] in BY_THREADS:
            return found[0]
        if not BY_WARPS.fullmatch(found["count"]):
            raise ValueError(f"who arrives on a barrier of {found['count']}, threads or warps?")
        return f"mbar_init({found['bar']}, {WARP} * ({found['count']}));"

    changed = INIT.sub(init, ELECTED.sub(arrive, source)).replace(
        PART, PART.replace("1", f"{WARP}")
    )
    if PART.split()[0] in changed and PART.replace("1", f"{WARP}") not in changed:
        raise ValueError(f"how many lanes arrive where {PART} was?")
    if left := LEFT.search(changed):
        raise ValueError(f"which lanes arrive here? {left[0]}")
    return changed


def every_lane_sources(files: dict[str, bytes]) -> dict[str, bytes]:
    """A kernel's files, changed but for the functions that they call."""
    return {
        name: text if name == "ptx.cuh" else every_lane(text.decode()).encode()
        for name, text in files.items()
    }
