"""Logits and prompts' tokens as the package transformers has them, for `colo-grpo verify`.

Arguments: a file with the question as JSON, and the file to write. Without arguments it says whether the packages are there. The file
has one line of JSON, then the logits of each sequence, [T, V] float32, as this machine orders bytes.
"""

import sys

sys.path[:] = [path for path in sys.path if path]  # not the current folder, which anybody may have filled

import json

import torch
import transformers


def load(folder, dtype, device):
    """A model whose weights alone are of the type: buffers keep theirs, which `model.to` would round."""
    name = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **{name: getattr(torch, dtype)})
    return model.to(device).eval()


def tokens(folder, prompts):
    """The tokens of each prompt, or the reason why there are none. AutoTokenizer of transformers 5 chooses a class by the model's type,
    which may rebuild the tokenizer in another way than its own tokenizer.json says."""
    try:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        return [list(tokenizer(text)["input_ids"]) for text in prompts]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(question, answer):
    asked = json.load(open(question))
    folder, device = asked["folder"], asked["device"]
    model = load(folder, asked["dtype"], device)
    with open(answer, "wb") as file:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        file.write(json.dumps({"versions": versions, "tokens": tokens(folder, asked["prompts"])}).encode() + b"\n")
        with torch.inference_mode():
            for sequence in asked["sequences"]:
                logits = model(input_ids=torch.tensor([sequence], device=device)).logits[0]
                file.write(logits.float().cpu().numpy().tobytes())


if len(sys.argv) == 3:
    main(*sys.argv[1:])
