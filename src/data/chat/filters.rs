//! Filters and tests of Python's Jinja that minijinja lacks or implements differently. Filters that only minijinja has are removed, so that a
//! template that transformers cannot render is rejected here, too.

use std::array;
use std::sync::LazyLock;

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, Value};
use regex::Regex;

use super::{invalid, methods, python, values};

/// Matches words like Python's `\w+`.
static WORD: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"[\p{L}\p{N}_]+").expect("a valid pattern"));

type Outcome = Result<Value, Error>;

/// Registers the filters and tests of Python's Jinja in an environment and removes those that only minijinja has.
pub(super) fn add(environment: &mut Environment<'static>) {
    ["attr", "bool", "chain", "lines", "pprint", "split", "zip"]
        .into_iter()
        .for_each(|name| environment.remove_filter(name));
    ["endingwith", "int", "safe", "startingwith"].into_iter().for_each(|name| environment.remove_test(name));
    environment.remove_global("debug");
    environment.add_filter("capitalize", |value: &Value| Ok::<_, Error>(methods::capitalized(&python::text(value)?)));
    environment.add_filter("center", center);
    environment.add_filter("dictsort", dictsort);
    ["e", "escape", "forceescape"].into_iter().for_each(|name| environment.add_filter(name, escape));
    environment.add_filter("float", float);
    environment.add_filter("indent", indent);
    environment.add_filter("int", int);
    environment.add_filter("items", items);
    environment.add_filter("join", join);
    environment.add_filter("lower", |value: &Value| Ok::<_, Error>(python::text(value)?.to_lowercase()));
    environment.add_filter("max", |value: &Value, args: Rest<Value>| extreme(value, &args, true));
    environment.add_filter("min", |value: &Value, args: Rest<Value>| extreme(value, &args, false));
    environment.add_filter("replace", replace);
    environment.add_filter("reverse", reverse);
    environment.add_filter("round", round);
    ["safe", "string"].into_iter().for_each(|name| environment.add_filter(name, |value: &Value| python::text(value)));
    environment.add_filter("title", title);
    environment.add_filter("trim", |value: &Value, args: Rest<Value>| {
        of_strings(value, "strip", &arguments(&args, ["chars"])?)
    });
    environment.add_filter("truncate", truncate);
    environment.add_filter("upper", |value: &Value| Ok::<_, Error>(python::text(value)?.to_uppercase()));
    environment.add_filter("urlencode", urlencode);
    environment.add_filter("wordcount", |value: &Value| Ok::<_, Error>(WORD.find_iter(&python::text(value)?).count()));
    // Python's None is not iterable; what is undefined is empty.
    environment.add_test("iterable", |value: &Value| {
        value.is_undefined() || !value.is_none() && minijinja::tests::is_iterable(value)
    });
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
    });
    environment.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    environment.add_test("lower", |value: &Value| Ok::<_, Error>(methods::is_lower(&python::text(value)?)));
    environment.add_test("upper", |value: &Value| Ok::<_, Error>(methods::is_upper(&python::text(value)?)));
}

/// Resolves the positional and keyword arguments of a filter to the parameters `names`.
fn arguments<const N: usize>(args: &[Value], names: [&str; N]) -> Result<[Option<Value>; N], Error> {
    let (by_place, by_name): (&[Value], Kwargs) = from_args(args)?;
    if by_place.len() > N {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut values = array::from_fn(|at| by_place.get(at).cloned());
    for (value, name) in values.iter_mut().zip(names).filter(|(_, name)| by_name.has(name)) {
        *value = Some(by_name.get(name)?);
    }
    by_name.assert_all_used()?;
    Ok(values)
}

fn count(value: Option<Value>, usual: usize) -> Result<usize, Error> {
    value.map_or(Ok(usual), usize::try_from)
}

fn flag(value: Option<Value>) -> bool {
    value.is_some_and(|value| value.is_true())
}

fn center(value: &Value, args: Rest<Value>) -> Outcome {
    let [width] = arguments(&args, ["width"])?;
    of_strings(value, "center", &[Some(Value::from(count(width, 80)?))])
}

/// Calls a Python string method on the text of a value.
fn of_strings(value: &Value, method: &str, args: &[Option<Value>]) -> Outcome {
    let args: Vec<Value> = args.iter().flatten().cloned().collect();
    Ok(methods::of_string(&python::text(value)?, method, &args)?.expect("one of its methods"))
}

/// Escapes HTML characters like Python's markupsafe.
fn escape(value: &Value) -> Result<String, Error> {
    let signs = [('&', "&amp;"), ('<', "&lt;"), ('>', "&gt;"), ('\'', "&#39;"), ('"', "&#34;")];
    Ok(signs.into_iter().fold(python::text(value)?, |text, (sign, escaped)| text.replace(sign, escaped)))
}

/// The `dictsort` filter: the pairs of a dictionary, sorted by key or value. Strings are compared without regard to case by default.
fn dictsort(value: &Value, args: Rest<Value>) -> Outcome {
    let [case_sensitive, by, reverse] = arguments(&args, ["case_sensitive", "by", "reverse"])?;
    let by_value = match by.as_ref().map(|by| by.as_str()) {
        None | Some(Some("key")) => false,
        Some(Some("value")) => true,
        _ => return Err(invalid("dictsort: by must be 'key' or 'value'")),
    };
    let map = value.as_object().filter(|_| value.kind() == ValueKind::Map);
    let pairs = map.and_then(|map| map.try_iter_pairs()).ok_or_else(|| invalid("dictsort: expected a dictionary"))?;
    let mut pairs: Vec<(Value, Value)> = pairs.collect();
    let case_sensitive = flag(case_sensitive);
    pairs.sort_by_cached_key(|(key, value)| folded(if by_value { value } else { key }, case_sensitive));
    if flag(reverse) {
        pairs.reverse();
    }
    Ok(pairs.into_iter().map(|(key, value)| values::tuple([key, value])).collect())
}

/// The sort key of a value: a string in lower case unless `case_sensitive`.
fn folded(value: &Value, case_sensitive: bool) -> Value {
    match value.as_str().filter(|_| !case_sensitive) {
        Some(text) => Value::from(text.to_lowercase()),
        None => value.clone(),
    }
}

fn items(value: &Value) -> Outcome {
    match (value.is_undefined(), values::view(value, "items")) {
        (true, _) => Ok(Value::from(Vec::<Value>::new())),
        (_, Some(items)) => Ok(items.try_iter()?.collect()),
        (_, None) => Err(invalid("items: can only get item pairs from a mapping")),
    }
}

/// The `float` filter: the value as a float, or the default if it is not a number.
fn float(value: &Value, args: Rest<Value>) -> Outcome {
    let [usual] = arguments(&args, ["default"])?;
    let number = match value.as_str() {
        _ if value.is_undefined() => return Err(Error::from(ErrorKind::UndefinedError)),
        Some(text) => text.trim().parse().ok(),
        None if value.is_none() => None,
        None => as_float(value),
    };
    Ok(number.map(Value::from).or(usual).unwrap_or_else(|| Value::from(0.0)))
}

/// The `int` filter: the value as an integer, or the default if it is not a number.
fn int(value: &Value, args: Rest<Value>) -> Outcome {
    let [usual, base] = arguments(&args, ["default", "base"])?;
    let base = u32::try_from(count(base, 10)?).ok().filter(|base| [2, 8, 10, 16].contains(base));
    let base = base.ok_or_else(|| invalid("int: base must be 2, 8, 10 or 16"))?;
    let whole = |number: f64| (number.is_finite() && number.abs() < 1e30).then_some(number as i128);
    let number = match value.as_str() {
        _ if value.is_undefined() => return Err(Error::from(ErrorKind::UndefinedError)),
        Some(text) => whole_number(text.trim(), base).or_else(|| text.trim().parse().ok().and_then(whole)),
        None if value.is_integer() => return Ok(value.clone()),
        None if value.is_none() => None,
        None => as_float(value).and_then(whole),
    };
    Ok(number.map(Value::from).or(usual).unwrap_or_else(|| Value::from(0)))
}

/// The value of a number or a boolean (0 or 1, as in Python); `None` for other values.
fn as_float(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        _ => f64::try_from(value.clone()).ok(),
    }
}

/// Parses like Python's `int(text, base)`: a sign, a prefix for the base, digits with single underscores between them.
fn whole_number(text: &str, base: u32) -> Option<i128> {
    let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        _ => "",
    };
    let has_prefix = !prefix.is_empty() && digits.get(..2).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
    let digits = if has_prefix { digits[2..].strip_prefix('_').unwrap_or(&digits[2..]) } else { digits };
    let is_joined = !digits.starts_with(['_', '+', '-']) && !digits.ends_with('_') && !digits.contains("__");
    let number = i128::from_str_radix(&digits.replace('_', ""), base).ok().filter(|_| is_joined)?;
    Some(if sign == "-" { -number } else { number })
}

fn indent(value: &Value, args: Rest<Value>) -> Outcome {
    let [width, first, blank] = arguments(&args, ["width", "first", "blank"])?;
    let indention = match width {
        Some(width) if width.as_str().is_some() => width.to_string(),
        width => " ".repeat(methods::width(count(width, 4)?)?),
    };
    let text = python::text(value)? + "\n";
    let (is_first, is_blank) = (flag(first), flag(blank));
    let lines = methods::split_lines(&text, false).into_iter().enumerate().map(|(at, line)| match at {
        0 if is_first => format!("{indention}{line}"),
        0 => line.to_owned(),
        _ if is_blank || !line.is_empty() => format!("{indention}{line}"),
        _ => String::new(),
    });
    Ok(lines.collect::<Vec<_>>().join("\n").into())
}

fn join(value: &Value, args: Rest<Value>) -> Outcome {
    let [separator, attribute] = arguments(&args, ["d", "attribute"])?;
    let separator = separator.map_or(Ok(String::new()), |separator| python::text(&separator))?;
    let items: Value = match attribute {
        Some(attribute) => value.try_iter()?.map(|item| attribute_of(&item, &attribute)).collect::<Result<_, _>>()?,
        None => value.clone(),
    };
    Ok(methods::join(&separator, &items)?.into())
}

/// Looks up `attribute` in an item: a dotted path such as `a.b`, or an index.
fn attribute_of(item: &Value, attribute: &Value) -> Outcome {
    match attribute.as_str() {
        Some(path) => path.split('.').try_fold(item.clone(), |item, name| match name.parse::<usize>() {
            Ok(index) => item.get_item(&Value::from(index)),
            Err(_) => item.get_attr(name),
        }),
        None => item.get_item(attribute),
    }
}

/// The filters `max` and `min`: the first of the largest or smallest items. Strings are compared without regard to case by default.
fn extreme(value: &Value, args: &[Value], is_max: bool) -> Outcome {
    let [case_sensitive, attribute] = arguments(args, ["case_sensitive", "attribute"])?;
    let case_sensitive = flag(case_sensitive);
    let mut best: Option<(Value, Value)> = None;
    for item in value.try_iter()? {
        let key = attribute.as_ref().map_or_else(|| Ok(item.clone()), |attribute| attribute_of(&item, attribute))?;
        let key = folded(&key, case_sensitive);
        let kinds = best.as_ref().map(|(best, _)| (best.kind(), key.kind()));
        if kinds.is_some_and(|(best, own)| best != own && [best, own].contains(&ValueKind::String)) {
            return Err(invalid("max and min: cannot compare a text with a number"));
        }
        if best.as_ref().is_none_or(|(best, _)| if is_max { key > *best } else { key < *best }) {
            best = Some((key, item));
        }
    }
    Ok(best.map_or(Value::UNDEFINED, |(_, item)| item))
}

fn replace(value: &Value, args: Rest<Value>) -> Outcome {
    let [old, new, count] = arguments(&args, ["old", "new", "count"])?;
    let [old, new] = [old, new].map(|text| text.ok_or_else(|| Error::from(ErrorKind::MissingArgument)));
    let (text, old, new) = (python::text(value)?, python::text(&old?)?, python::text(&new?)?);
    let count = count.filter(|count| !count.is_none()).map_or(Ok(-1), i64::try_from)?;
    Ok(match usize::try_from(count) {
        Ok(count) => text.replacen(&old, &new, count),
        Err(_) => text.replace(&old, &new),
    }
    .into())
}

/// The `reverse` filter: a string, a list or a dictionary's keys in reverse order.
fn reverse(value: &Value) -> Outcome {
    if let Some(text) = value.as_str() {
        return Ok(text.chars().rev().collect::<String>().into());
    }
    let mut items: Vec<Value> = value.try_iter()?.collect();
    items.reverse();
    Ok(items.into())
}

/// The `round` filter: like Python's `round` (ties to even), `math.ceil` or `math.floor`, at the given number of decimals.
fn round(value: &Value, args: Rest<Value>) -> Outcome {
    let [precision, method] = arguments(&args, ["precision", "method"])?;
    let digits = precision.map_or(Ok(0), i64::try_from)?;
    let digits = usize::try_from(digits).ok().filter(|&digits| digits <= 300);
    let digits = digits.ok_or_else(|| invalid("round: precision must be from 0 to 300"))?;
    let number = f64::try_from(value.clone())?;
    let scale = 10f64.powi(digits as i32);
    match method.as_ref().map_or(Some("common"), |method| method.as_str()) {
        Some("common") if value.is_integer() => Ok(value.clone()),
        Some("common") => {
            Ok(Value::from(format!("{number:.digits$}").parse::<f64>().map_err(|error| invalid(error.to_string()))?))
        }
        Some("ceil") => Ok(Value::from((number * scale).ceil() / scale)),
        Some("floor") => Ok(Value::from((number * scale).floor() / scale)),
        _ => Err(invalid("round: method must be common, ceil or floor")),
    }
}

/// The `title` filter: capitalizes each word; words begin after white space, hyphens and opening brackets.
fn title(value: &Value) -> Outcome {
    let is_between = |letter: char| letter.is_whitespace() || "-({[<".contains(letter);
    let (text, mut titled) = (python::text(value)?, String::new());
    for part in text.split_inclusive(is_between) {
        let (word, between) = match part.char_indices().next_back() {
            Some((at, last)) if is_between(last) => part.split_at(at),
            _ => (part, ""),
        };
        let mut letters = word.chars();
        titled.extend(letters.next().into_iter().flat_map(char::to_uppercase));
        titled.push_str(&letters.as_str().to_lowercase());
        titled.push_str(between);
    }
    Ok(titled.into())
}

fn truncate(value: &Value, args: Rest<Value>) -> Outcome {
    let [length, killwords, end, leeway] = arguments(&args, ["length", "killwords", "end", "leeway"])?;
    let leeway = leeway.filter(|leeway| !leeway.is_none());
    let (length, leeway) = (count(length, 255)?, count(leeway, 5)?);
    let end = end.map_or(Ok("...".to_owned()), |end| python::text(&end))?;
    if value.as_str().is_none() {
        let fits = value.len().is_some_and(|len| len <= length.saturating_add(leeway));
        return if fits { Ok(value.clone()) } else { Err(invalid("truncate: expected a text")) };
    }
    let (text, num_end) = (python::text(value)?, end.chars().count());
    let kept =
        length.checked_sub(num_end).ok_or_else(|| invalid(format!("expected length >= {num_end}, got {length}")))?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.into());
    }
    let start: String = text.chars().take(kept).collect();
    let start =
        if flag(killwords) { &start } else { start.rsplit_once(' ').map_or(start.as_str(), |(start, _)| start) };
    Ok(format!("{start}{end}").into())
}

/// The `urlencode` filter: percent-encodes a string for a path, or key-value pairs for a query.
fn urlencode(value: &Value) -> Outcome {
    let quote = |value: &Value, is_query: bool| {
        let mut quoted = String::new();
        for byte in python::text(value)?.bytes() {
            match byte {
                b' ' if is_query => quoted.push('+'),
                b'/' if !is_query => quoted.push('/'),
                b'_' | b'.' | b'-' | b'~' => quoted.push(byte.into()),
                byte if byte.is_ascii_alphanumeric() => quoted.push(byte.into()),
                byte => quoted.push_str(&format!("%{byte:02X}")),
            }
        }
        Ok::<_, Error>(quoted)
    };
    let is_text = matches!(value.kind(), ValueKind::String | ValueKind::Number | ValueKind::Bool | ValueKind::None);
    if is_text || value.is_undefined() {
        return Ok(quote(value, false)?.into());
    }
    let pairs = values::view(value, "items").unwrap_or_else(|| value.clone());
    let pair = |pair: Value| {
        let [key, value] = [0, 1].map(|at| pair.get_item(&Value::from(at)));
        Ok::<_, Error>(format!("{}={}", quote(&key?, true)?, quote(&value?, true)?))
    };
    Ok(pairs.try_iter()?.map(pair).collect::<Result<Vec<_>, Error>>()?.join("&").into())
}
