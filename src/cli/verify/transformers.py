"""Logits, blocks and texts' tokens as the package transformers has them, for `colo-grpo verify`.

Arguments: a file with the question as JSON, and the file to write. Without arguments it says whether the packages are there.

The reference is computed in float32 on the weights as `dtype` rounds them: every layer's weights are widened while it runs, so that no
second model is held. In bfloat16 the model also computes in its own type, to say how far rounding alone takes transformers from
the reference. Both pass each layer the same input, rounded to `dtype`, so that a layer's error is its own.

The file has one line of JSON, the header, then float32 arrays of each sequence in this machine's byte order. T tokens, D hidden, V vocabulary, L layers:
    inputs [L + 1, T, D]     rounded inputs of the layers and of the final norm
    outputs [L, T, D]        the layers' outputs for them
    head [T, V]              logits for the last input
    logits [T, V]            logits of the whole model, nothing rounded in between
"""

import sys

sys.path[:] = [path for path in sys.path if path]  # not the current folder, which anybody may have filled

import json

import torch
import transformers


def load(folder, dtype, device):
    """A model whose weights alone are of the type: buffers keep theirs, which `model.to` would round."""
    is_new = int(transformers.__version__.split(".")[0]) >= 5
    # The grouped products that it would take for experts refuse rows that are no multiple of 16 bytes.
    keys = {"dtype": getattr(torch, dtype), "experts_implementation": "eager"} if is_new else {"torch_dtype": getattr(torch, dtype)}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **keys)
    except ValueError as error:
        is_unknown = "Unrecognized configuration class" in str(error)
        if not is_unknown or not hasattr(transformers.AutoConfig.from_pretrained(folder), "vision_config"):
            raise
        # Mistral Small 3.1 and others with images are in transformers' list of such models alone.
        model = transformers.AutoModelForImageTextToText.from_pretrained(folder, **keys)
    return model.to(device).eval()


def tokens(folder, texts):
    """The tokens of each text by tokenizer.json as it is written, and by AutoTokenizer with the name of its class: transformers 5 builds some
    classes anew, in another way than the file says. The reason why there are none in place of tokens."""

    def read(reader):
        try:
            tokenizer = reader.from_pretrained(folder)
            return type(tokenizer).__name__, [list(tokenizer(text)["input_ids"]) for text in texts]
        except Exception as error:
            return reader.__name__, f"{type(error).__name__}: {error}"

    name, auto = read(transformers.AutoTokenizer)
    return {"file": read(transformers.PreTrainedTokenizerFast)[1], "auto": auto, "class": name}


def parts(model):
    """The decoder's layers and the norm behind them."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, torch.nn.ModuleList) and len(layers) == count and hasattr(module, "norm"):
            return layers, module.norm
    raise RuntimeError(f"cannot find a list of {count} layers followed by a norm in {type(model).__name__}")


def first(output):
    return output[0] if isinstance(output, tuple) else output


def widened(module):
    """Has a module compute in float32 while it runs; its own weights are put back afterwards."""
    kept = []

    def widen(*_):
        for weight in module.parameters():
            kept.append((weight, weight.data))
            weight.data = weight.data.float()

    def restore(*_):
        while kept:
            weight, data = kept.pop()
            weight.data = data

    return [module.register_forward_pre_hook(widen), module.register_forward_hook(restore, always_call=True)]


class Recorder:
    """Keeps what each layer makes of an input that is rounded to `dtype`: the model's own inputs, or those of another recorder."""

    def __init__(self, model, dtype, given=None):
        self.dtype, self.given = dtype, given
        self.inputs, self.outputs = [], []
        layers, norm = parts(model)
        self.hooks = [layer.register_forward_hook(self.layer, with_kwargs=True, prepend=True) for layer in layers]
        self.hooks.append(norm.register_forward_pre_hook(lambda _, args: self.take(args[0])))

    def take(self, own):
        """Keeps the next input, rounded; it has the type of the model's own."""
        chosen = own if self.given is None else self.given.inputs[len(self.inputs)]
        self.inputs.append(chosen.to(self.dtype).to(own.dtype))

    def layer(self, layer, args, kwargs, output):
        self.take(args[0] if args else kwargs["hidden_states"])
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        self.outputs.append(first(layer.forward(self.inputs[-1], *args[1:], **rest)).float())

    def run(self, model, sequence):
        """Logits of the whole model and of its head for the last input, [T, V] each."""
        self.inputs, self.outputs = [], []
        logits = model(input_ids=sequence, use_cache=False).logits[0].float()
        last, kept = self.inputs.pop(), self.inputs
        replaced = parts(model)[1].register_forward_pre_hook(lambda *_: (last,))
        for hook in self.hooks:
            hook.remove()
        head = model(input_ids=sequence, use_cache=False).logits[0].float()
        replaced.remove()
        self.inputs = [*kept, last]
        return logits, head


def distances(outputs, references, inputs):
    """How far each token's update of the residual stream is from the reference's, as a share of it. [L][T]"""
    far = lambda a, b: (a - b).double().norm(dim=-1)[0]
    return [far(ours, theirs) / far(theirs, given.float()) for ours, theirs, given in zip(outputs, references, inputs)]


def rounding(model, sequence, reference, logits, head):
    """How far the model itself, in its own type, is from the reference."""
    own = Recorder(model, model.dtype, reference)
    own_logits, own_head = own.run(model, sequence)
    expected = logits.double().log_softmax(-1)
    kl = (expected.exp() * (expected - own_logits.double().log_softmax(-1))).sum(-1)
    taken = logits[:-1].double().log_softmax(-1).gather(-1, sequence[0, 1:, None])
    found = own_logits[:-1].double().log_softmax(-1).gather(-1, sequence[0, 1:, None])
    return {
        "blocks": [far.tolist() for far in distances(own.outputs, reference.outputs, reference.inputs)],
        "head": ((own_head - head).norm(dim=-1) / head.norm(dim=-1)).tolist(),
        "kl": kl.tolist(),
        "logprobs": (found - taken).abs()[:, 0].tolist(),
    }


def main(question, answer):
    asked = json.load(open(question))
    folder, device, dtype = asked["folder"], asked["device"], getattr(torch, asked["dtype"])
    model = load(folder, asked["dtype"], device)
    layers, norm = parts(model)
    header = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "tokens": tokens(folder, asked["texts"]),
        "rounding": None if dtype == torch.float32 else [],
    }
    arrays = []
    with torch.no_grad():
        for sequence in asked["sequences"]:
            sequence = torch.tensor([sequence], device=device)
            wide = [hook for part in (model.get_input_embeddings(), *layers, norm, model.get_output_embeddings()) for hook in widened(part)]
            reference = Recorder(model, dtype)
            logits, head = reference.run(model, sequence)
            for hook in wide:
                hook.remove()
            if header["rounding"] is not None:
                header["rounding"].append(rounding(model, sequence, reference, logits, head))
            arrays += [array.reshape(-1).cpu().numpy() for array in (*reference.inputs, *reference.outputs, head, logits)]
    with open(answer, "wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        for array in arrays:
            file.write(array.tobytes())


if len(sys.argv) == 3:
    main(*sys.argv[1:])
