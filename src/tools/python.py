"""The interpreter of colo-grpo's tool `python`, inside of the sandbox: runs one call after the other, each with the variables and imports
of those before. A request is code behind its length, 4 bytes, big-endian, and a mark that is made for it. What comes back is text, then
the mark, then 1 if the call ended otherwise than by its end or 0.

What a call prints is its result, with the value of a last expression and the traceback of an exception, as in a notebook. Nothing here
keeps a program from anything: the code that a model wrote has this process for itself, and all that it could forge is text and its own
end. The sandbox keeps it, and whoever started it bounds the text and ends it when a call takes too long.
"""

import os

# Many interpreters share the machine, and threads count towards the sandbox's limit.
for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ[f"{library}_NUM_THREADS"] = "1"

import ast
import io
import linecache
import signal
import struct
import sys
import traceback
import types

MARK_BYTES = 16


class Output(io.TextIOBase):
    """What a call prints, up to a limit."""

    def __init__(self, max_chars):
        self.max_chars, self.num_chars, self.parts = max_chars, 0, []

    def writable(self):
        return True

    def write(self, text):
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self.num_chars += len(text)
        if self.is_overfull():
            raise OSError(f"more than {self.max_chars} characters of output")
        self.parts.append(text)
        return len(text)

    def is_overfull(self):
        return self.num_chars > self.max_chars


class Interpreter:
    def __init__(self, timeout_s, max_chars):
        self.timeout_s, self.max_chars = timeout_s, max_chars
        self.num_calls, self.is_timed = 0, False
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module  # where classes that a call defines are looked up
        self.variables = vars(module)
        signal.signal(signal.SIGALRM, self.alarm)

    def alarm(self, *_):
        if self.is_timed:
            raise TimeoutError(f"the call took longer than {self.timeout_s:g} s")

    def execute(self, code, output):
        """Runs the code; the value of a last expression is printed."""
        self.num_calls += 1
        name = f"<call {self.num_calls}>"
        linecache.cache[name] = len(code), None, code.splitlines(True), name
        statements = ast.parse(code, name).body
        is_value = bool(statements) and isinstance(statements[-1], ast.Expr)
        last = ast.Expression(statements.pop().value) if is_value else None
        exec(compile(ast.Module(statements, []), name, "exec"), self.variables)
        value = None if last is None else eval(compile(last, name, "eval"), self.variables)
        if value is not None:
            output.write(f"{value!r}\n")

    def call(self, code):
        """The content of the answer, and whether the code ended otherwise than by its end."""
        sys.stdout = sys.stderr = output = Output(self.max_chars)
        error = None
        try:
            try:
                self.is_timed = True
                signal.setitimer(signal.ITIMER_REAL, self.timeout_s)
                self.execute(code, output)
            finally:
                self.is_timed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except SystemExit as exit:
            error = None if exit.code in (None, 0) else exit
        except BaseException as other:
            error = other
        if output.is_overfull():
            return str({"error": f"more than {self.max_chars} characters of output"}), True
        content = ("".join(output.parts) + ("" if error is None else described(error))).removesuffix("\n")
        if len(content) > self.max_chars:
            content = str({"error": f"the result has {len(content)} characters, more than {self.max_chars}"})
        return content, error is not None


def described(error):
    """The traceback without this program's own frames."""
    whole = traceback.TracebackException.from_exception(error)
    own = described.__code__.co_filename
    whole.stack = traceback.StackSummary.from_list([frame for frame in whole.stack if frame.filename != own])
    return "".join(whole.format())


def serve(timeout_s, max_chars):
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    interpreter = Interpreter(timeout_s, max_chars)
    while len(head := source.read(4)) == 4:
        mark, code = source.read(MARK_BYTES), source.read(struct.unpack(">I", head)[0]).decode()
        try:
            content, failed = interpreter.call(code)
        except BaseException as error:  # no memory is left to describe the first one
            content, failed = type(error).__name__, True
        sink.write(content.encode(errors="replace") + mark + (b"1" if failed else b"0"))
        sink.flush()
