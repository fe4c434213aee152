#!/usr/bin/env python3
"""Records what transformers answers `colo-grpo verify`, for its tests. Needs torch and transformers (made with 2.11 and 5.24).

    golden_verify.py tests/golden/qwen2_tied              writes verify_float32.bin and verify_bfloat16.bin there
  golden_verify.py tests/golden/gemma3 float32          writes verify_float32.bin there

The question is the folder's recorded prompt with the first token that follows it; the program that answers is verify's own.
"""
import json, pathlib, subprocess, sys, tempfile

folder = pathlib.Path(sys.argv[1])
golden = json.loads((folder / "golden.json").read_text())
index = golden["all_logits_of"]
program = pathlib.Path(__file__).resolve().parent.parent / "src/cli/verify/transformers.py"
for dtype in sys.argv[2:] or ("float32", "bfloat16"):
    with tempfile.TemporaryDirectory() as place:
        asked = pathlib.Path(place) / "question.json"
        sequence = golden["input_ids"][index] + golden["greedy"][index][:1]
        asked.write_text(json.dumps({"folder": str(folder), "dtype": dtype, "device": "cpu", "texts": [], "sequences": [sequence]}))
        subprocess.run([sys.executable, "-c", program.read_text(), asked, folder / f"verify_{dtype}.bin"], check=True)
