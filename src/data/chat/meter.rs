//! Bounds what a template holds while it runs. minijinja counts instructions, not bytes, and thirty of them make a gigabyte of a
//! letter: so every instruction that makes a value is followed by one that measures it, and what is written is counted as it is
//! written. A few filters and methods that make much of little at one stroke are measured before, or left out.

use std::fmt::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::machinery::{
    CompiledTemplate, Instruction, Instructions, TemplateConfig, Token, Vm, WhitespaceConfig, make_string_output,
    tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Object, Rest, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, filters};
use minijinja_contrib::pycompat;

/// Bytes that one conversation may make on its way: of all values when they are made, and of what is written.
const MAX_BYTES: usize = 64 << 20;
/// The longest template; those of today's models have a tenth of it.
const MAX_SOURCE_BYTES: usize = 256 << 10;
/// transformers' white space.
const WHITE_SPACE: WhitespaceConfig =
    WhitespaceConfig { trim_blocks: true, lstrip_blocks: true, keep_trailing_newline: false };
/// Lists within lists.
const MAX_DEPTH: usize = 64;
/// What a value takes beside its text.
const VALUE_BYTES: usize = size_of::<Value>();

/// Names that no template can write.
const MEASURE: &str = "+measure";
const CONCAT: &str = "+concat";
const ALL_AT_ONCE: [(&str, &str); 3] = [("replace", "+replace"), ("join", "+join"), ("indent", "+indent")];
/// Filters whose work grows with a number that the template gives; chat templates do without them.
const LEFT_OUT: [&str; 4] = ["batch", "slice", "format", "pprint"];

/// Text that is compiled makes nothing of itself: `a * b` becomes `a * _one * b`, as the compiler would work out a product of
/// literals, which may be of any size, before anything is measured.
pub(super) fn unfolded(source: &str) -> Result<String, Error> {
    if source.len() > MAX_SOURCE_BYTES {
        return Err(Error::new(ErrorKind::SyntaxError, format!("more than {MAX_SOURCE_BYTES} bytes")));
    }
    let (mut text, mut copied, mut is_splat) = (String::with_capacity(source.len()), 0, false);
    for token in tokenize(source, false, SyntaxConfig, WHITE_SPACE) {
        let (token, span) = token?;
        if matches!(token, Token::Mul) && !is_splat {
            let end = span.end_offset as usize;
            text.extend([&source[copied..end], "_one*"]);
            copied = end;
        }
        is_splat = matches!(token, Token::ParenOpen | Token::Comma); // before the star of `f(*list)`
    }
    Ok(text + &source[copied..])
}

/// Compiles `source` for [`render`].
pub(super) fn compile(source: &str) -> Result<CompiledTemplate<'_>, Error> {
    let config = TemplateConfig {
        syntax_config: SyntaxConfig,
        ws_config: WHITE_SPACE,
        default_auto_escape: Arc::new(|_| AutoEscape::None),
    };
    let mut template = CompiledTemplate::new("chat_template", source, &config)?;
    template.instructions = measured(&template.instructions);
    template.blocks.values_mut().for_each(|block| *block = measured(block));
    Ok(template)
}

/// What [`compile`] relies on.
pub(super) fn prepare(environment: &mut Environment<'static>) {
    environment.add_global("_one", 1);
    environment.set_formatter(|out, state, value| {
        let meter = Meter::of(state);
        meter.take_value(value, 0)?;
        meter.write(out, value)
    });
    environment.add_filter(MEASURE, |state: &State, value: Value| {
        Meter::of(state).take_value(&value, 0)?;
        Ok::<_, Error>(value)
    });
    environment.add_filter(CONCAT, |state: &State, left: Value, right: Value| {
        let (meter, mut text) = (Meter::of(state), String::new());
        [left, right].iter().try_for_each(|value| {
            meter.take_value(value, 0)?;
            meter.write(&mut text, value)
        })?;
        Ok::<_, Error>(Value::from(text))
    });
    environment.add_filter(ALL_AT_ONCE[0].1, filters::replace);
    environment.add_filter(ALL_AT_ONCE[1].1, filters::join);
    environment.add_filter(ALL_AT_ONCE[2].1, filters::indent);
    for (name, plain) in ALL_AT_ONCE {
        environment.add_filter(name, move |state: &State, args: Rest<Value>| {
            Meter::of(state).take(cost(name, &args))?;
            state.apply_filter(plain, &args)
        });
    }
    LEFT_OUT.iter().for_each(|name| environment.remove_filter(name));
    environment.set_unknown_method_callback(|state, value, method, args| {
        let all: Vec<Value> = [value].into_iter().chain(args).cloned().collect();
        match method {
            "format" => return Err(Error::from(ErrorKind::UnknownMethod)),
            "join" if all.len() == 2 => Meter::of(state).take(cost("join", &[all[1].clone(), value.clone()]))?,
            method => Meter::of(state).take(cost(method, &all))?,
        }
        pycompat::unknown_method_callback(state, value, method, args)
    });
}

/// The text that a compiled template makes of its variables.
pub(super) fn render(
    environment: &Environment<'_>,
    template: &CompiledTemplate<'_>,
    variables: Value,
) -> Result<String, Error> {
    let mut text = String::new();
    let output = &mut make_string_output(&mut text);
    Vm::new(environment).eval(&template.instructions, variables, &template.blocks, output, AutoEscape::None)?;
    Ok(text)
}

/// The same instructions with measurements; jumps lead where they led.
fn measured<'source>(plain: &Instructions<'source>) -> Instructions<'source> {
    let mut measured = Instructions::new(plain.name(), plain.source());
    let mut places = Vec::with_capacity(plain.len() + 1); // of the plain instructions
    for index in 0..plain.len() as u32 {
        places.push(measured.len() as u32);
        let line = plain.get_line(index).unwrap_or_default() as u16;
        let mut add = |instruction| _ = measured.add_with_line(instruction, line);
        match plain.get(index).expect("within the length") {
            Instruction::EmitRaw(text) => {
                add(Instruction::LoadConst(Value::from(*text)));
                add(Instruction::Emit); // by the formatter
            }
            Instruction::StringConcat => add(Instruction::ApplyFilter(CONCAT, Some(2), u8::MAX)),
            other => {
                add(other.clone());
                if makes_a_value(other) {
                    add(Instruction::ApplyFilter(MEASURE, Some(1), u8::MAX));
                }
            }
        }
    }
    places.push(measured.len() as u32);
    for index in 0..measured.len() as u32 {
        use Instruction::{BuildMacro, Iterate, Jump, JumpIfFalse, JumpIfFalseOrPop, JumpIfTrueOrPop};
        if let Some(
            Iterate(target)
            | Jump(target)
            | JumpIfFalse(target)
            | JumpIfFalseOrPop(target)
            | JumpIfTrueOrPop(target)
            | BuildMacro(_, target, _),
        ) = measured.get_mut(index)
        {
            *target = places[*target as usize];
        }
    }
    measured
}

fn makes_a_value(instruction: &Instruction<'_>) -> bool {
    use Instruction::{
        Add, ApplyFilter, BuildList, BuildMap, CallFunction, CallMethod, CallObject, EndCapture, Mul, Slice,
    };
    matches!(
        instruction,
        Add | Mul
            | Slice
            | BuildList(_)
            | BuildMap(_)
            | EndCapture
            | ApplyFilter(..)
            | CallFunction(..)
            | CallMethod(..)
            | CallObject(_)
    )
}

/// Bytes that a call makes at most, beyond a few times those of its arguments.
fn cost(name: &str, args: &[Value]) -> usize {
    let text = |index: usize| args.get(index).map(Value::to_string).unwrap_or_default();
    match name {
        "replace" => text(0).matches(&text(1)).count().saturating_mul(text(2).len()),
        "join" => args.first().and_then(Value::len).unwrap_or_default().saturating_mul(text(1).len()),
        "indent" => {
            let named = args.last().and_then(|last| Kwargs::try_from(last.clone()).ok()?.get("width").ok());
            let width = named.or_else(|| args.get(1)?.as_usize()).unwrap_or(4);
            text(0).lines().count().saturating_mul(width)
        }
        _ => 0,
    }
}

/// What is left of a conversation's bytes; one for each rendering.
#[derive(Debug, Default)]
struct Meter {
    used: AtomicUsize,
}

impl Object for Meter {}

impl Meter {
    fn of(state: &State<'_, '_>) -> Arc<Self> {
        state.get_or_set_temp_object("meter", Self::default)
    }

    fn take(&self, bytes: usize) -> Result<(), Error> {
        let used = self.used.fetch_add(bytes.min(MAX_BYTES + 1), Ordering::Relaxed);
        if used.saturating_add(bytes) <= MAX_BYTES {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("the conversation takes more than {MAX_BYTES} bytes to render"),
        ))
    }

    /// A value with all that it holds.
    fn take_value(&self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("more than {MAX_DEPTH} lists within one another"),
            ));
        }
        let text = match value.kind() {
            ValueKind::Number => value.to_string().len(),
            _ => value.as_bytes().map_or(0, <[u8]>::len),
        };
        self.take(VALUE_BYTES + text)?;
        if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
            return Ok(());
        }
        for item in value.try_iter()? {
            if value.kind() == ValueKind::Map {
                self.take_value(&value.get_item(&item)?, depth + 1)?;
            }
            self.take_value(&item, depth + 1)?;
        }
        Ok(())
    }

    fn write(&self, to: &mut dyn Write, value: &Value) -> Result<(), Error> {
        let mut metered = Metered { meter: self, to, over: None };
        let written = write!(metered, "{value}");
        metered.over.map_or(written.map_err(Error::from), Err)
    }
}

/// A writer that is measured.
struct Metered<'a> {
    meter: &'a Meter,
    to: &'a mut dyn Write,
    over: Option<Error>,
}

impl Write for Metered<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if let Err(over) = self.meter.take(text.len()) {
            self.over = Some(over);
            return Err(fmt::Error);
        }
        self.to.write_str(text)
    }
}
