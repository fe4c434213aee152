//! Parses the query of a request's URL.

/// The query of a request's URL: decoded names and values.
#[derive(Debug, Default)]
pub(super) struct Query(Vec<(String, String)>);

impl Query {
    pub fn new(text: &str) -> Self {
        let pair = |pair: &str| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decoded(name), decoded(value))
        };
        Self(text.split('&').map(pair).collect())
    }

    /// The value of a parameter; `None` if it is absent or empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        let value = self.0.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str());
        value.filter(|value| !value.is_empty())
    }

    /// The value of a parameter as an integer.
    ///
    /// # Errors
    /// A message that names the parameter.
    pub fn number(&self, name: &str) -> Result<Option<u64>, String> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.parse().map(Some).map_err(|_| format!("{name} = {value}: expected a whole number"))
    }

    /// The value of a parameter as a list of integers. Items that are not integers are left out.
    pub fn numbers(&self, name: &str) -> Vec<usize> {
        self.get(name).into_iter().flat_map(|list| list.split(',')).filter_map(|number| number.parse().ok()).collect()
    }
}

fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let [byte, after @ ..] = rest {
        let escaped = after.get(..2).filter(|_| *byte == b'%').and_then(|digits| std::str::from_utf8(digits).ok());
        match escaped.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(escaped) => {
                bytes.push(escaped);
                rest = &after[2..];
            }
            None => {
                bytes.push(if *byte == b'+' { b' ' } else { *byte });
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_names_and_values_are_decoded() {
        let query = Query::new("runs=0,x,2&text=a%2Bb+c%3c%&step=&page=9&page=7&odd=%zz%f");
        assert_eq!((query.numbers("runs"), query.get("text"), query.get("step")), (vec![0, 2], Some("a+b c<%"), None));
        assert_eq!(
            (query.number("page"), query.number("none"), query.get("odd")),
            (Ok(Some(9)), Ok(None), Some("%zz%f"))
        );
        assert_eq!(query.number("text").unwrap_err(), "text = a+b c<%: expected a whole number");
        assert_eq!(Query::new("").get(""), None);
    }
}
