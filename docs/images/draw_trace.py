"""Draw a part of a trace of `sky.profile` as the picture in docs/device.md; needs matplotlib.

python docs/images/draw_trace.py TRACE.json FROM_MS TO_MS PICTURE.png
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

COLORS = {
    "client": {"issue": "#7fb2e5", "waits": "#f2a65a", "transfers": "#c9a2dd", "wire": "#9aa5b1"},
    "worker": {"operations": "#7cc49a", "kernels": "#e58a8a"},
}
OTHERS = {"take an upload": "#c9a2dd", "send a value": "#f2a65a", "wait for the device": "#f2a65a"}
"""What a worker does besides operations has the color of what the client does meanwhile."""
HEIGHT = 0.72


def main(trace: Path, begin: float, end: float, picture: Path) -> None:
    events = json.loads(trace.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = defaultdict(list)
    for e in events:
        if e["ph"] == "X" and e["ts"] / 1e3 < end and (e["ts"] + e["dur"]) / 1e3 > begin:
            slices[e["pid"], e["tid"]].append(e)
    tracks = [track for track in names if slices[track]]

    figure, axes = plt.subplots(figsize=(13, 0.62 * len(tracks) + 1.5), dpi=110)
    axes.set_xlim(begin, end)
    axes.set_ylim(len(tracks) + 0.1, -0.35)
    rows = {track: row for row, track in enumerate(tracks)}
    texts = []
    for track, row in rows.items():
        process = processes[track[0]].split()[0]
        first_word = names[track].split()[0].strip(",")
        color = COLORS[process].get(first_word, "#cccccc")
        axes.axhspan(row, row + HEIGHT, color="#f4f6f8", zorder=0)
        for e in slices[track]:
            start, width = e["ts"] / 1e3, e["dur"] / 1e3
            axes.barh(
                row + HEIGHT / 2,
                width,
                HEIGHT,
                start,
                color=OTHERS.get(e["name"], color),
                edgecolor="white",
                # A line around a slice of a few pixels would hide it.
                lw=0.4 if width > (end - begin) / 300 else 0,
            )
            shown = (max(start, begin), min(start + width, end))
            label = e["name"].removeprefix("aten::")
            texts.append((shown, row + HEIGHT / 2, label))
    # A label is drawn only where it fits its slice.
    renderer = figure.canvas.get_renderer()
    for (start, stop), middle, label in texts:
        text = axes.text((start + stop) / 2, middle, label, ha="center", va="center", fontsize=7.5)
        box = text.get_window_extent(renderer).transformed(axes.transData.inverted())
        if box.width > 0.94 * (stop - start):
            text.remove()
    # From the issue of each operation to its run, thinned out.
    flows = defaultdict(dict)
    for e in events:
        if e["ph"] in "stf":
            flows[e["id"]][e["ph"]] = e
    for number, flow in enumerate(flows.values()):
        source, target = flow["s"], flow.get("t") or flow["f"]
        points = [(e["ts"] / 1e3, rows.get((e["pid"], e["tid"]))) for e in (source, target)]
        if number % 4 or any(row is None or not begin < at < end for at, row in points):
            continue
        axes.annotate(
            "",
            (points[1][0], points[1][1]),
            (points[0][0], points[0][1] + HEIGHT),
            arrowprops={"arrowstyle": "->", "color": "#5b6770", "lw": 0.6, "alpha": 0.8},
        )
    axes.set_yticks(
        [row + HEIGHT / 2 for row in rows.values()],
        [f"{processes[t[0]].split(' (')[0]}: {names[t].split(' (')[0]}" for t in rows],
    )
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("milliseconds since the block began")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    worker = next(name for name in processes.values() if name.startswith("worker"))
    axes.set_title(f"A trace of sky.profile: client and {worker}", loc="left", fontsize=11)
    figure.tight_layout()
    figure.savefig(picture, facecolor="white")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
