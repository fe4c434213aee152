#!/usr/bin/env bash
# Takes the pictures of docs/watch.md from runs that are there: a wide window, and one of 420 pixels. Needs Chromium (Debian: chromium)
# and, to keep the files small, Python with Pillow. PROGRAM names the program, target/release/colo-grpo unless it is set.
#   scripts/watch_pictures.sh DIR FOLDER TEXT    (two runs below DIR, pictures into FOLDER, completions whose prompt has the TEXT)
set -euo pipefail
[ $# = 3 ] || { sed -n '2,4p' "$0"; exit 2; }
folder=$2
program=${PROGRAM:-${CARGO_TARGET_DIR:-target}/release/colo-grpo}
python=${PYTHON:-python3}
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) ||
    { echo "watch_pictures: no Chromium is installed: no picture is taken" >&2; exit 4; }
work=$(mktemp -d)
trap 'kill "$watcher" 2>/dev/null; rm -rf "$work"' EXIT
"$program" watch "$1" --port 0 2>"$work/said" &
watcher=$!
for _ in $(seq 100); do grep -q "watching at" "$work/said" && break || sleep 0.1; done
address=$(grep -o "http://[^ ]*" "$work/said")

# NAME, WIDTH, HEIGHT, ROWS, what follows the address: ROWS are kept of the upper end, or, below 0, of the lower one. Time runs as
# fast as the page can use it: it has seconds to fetch everything.
picture() {
    "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$work/browser" --virtual-time-budget=8000 \
        --window-size="$2,$3" --screenshot="$work/$1.png" "$address/$5" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
    "$python" - "$work/$1.png" "$folder/$1.png" "$4" <<'PY'
import sys
from PIL import Image, ImageChops
source, target, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
image = Image.open(source).convert("RGB")
end = ImageChops.difference(image, Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))).getbbox()[3]
box = (0, 0, image.width, rows) if rows > 0 else (0, end + rows, image.width, end)
image.crop(box).quantize(48, dither=Image.Dither.NONE).save(target, optimize=True)
PY
}
mkdir -p "$folder"
picture watch 1200 1500 1500 "#runs=0"
picture watch-compared 1200 1600 1600 "#runs=0,1"
picture watch-completions 1200 6000 -950 "#runs=0&run=0&other_run=1&text=$3"
picture watch-narrow 420 1500 1500 "#runs=0"
ls -l "$folder"/watch*.png
