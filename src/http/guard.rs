//! Protects a server against requests from foreign web pages.
//!
//! A browser sends requests of any web page, also to addresses of this machine. Such requests are recognized by three headers: `Host`, if a foreign
//! name was made to resolve to this server (DNS rebinding); the `Origin` of the page; and content types that a page may send anywhere without a
//! preflight request.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::Response;

/// Headers and methods that pages of an allowed origin may use.
const FOR_ALLOWED_ORIGINS: [(HeaderName, &str); 3] = [
    (header::ACCESS_CONTROL_ALLOW_HEADERS, "authorization, content-type"),
    (header::ACCESS_CONTROL_ALLOW_METHODS, "GET, POST"),
    (header::ACCESS_CONTROL_MAX_AGE, "600"),
];

/// The hosts and origins from which requests are accepted.
#[derive(Debug, Clone, Default)]
pub struct Guard {
    /// Names of the server, besides its address and the names that always mean this machine.
    hosts: Vec<String>,
    origins: Vec<String>,
    is_open_to_any_host: bool,
}

/// Status and reason of a refused request.
type GuardRefusal = (StatusCode, String);

/// A guard with the function that builds the response for a refused request.
#[derive(Debug, Clone)]
struct Guarded {
    guard: Guard,
    refuse: fn(StatusCode, String) -> Response,
}

impl Guard {
    /// A guard for a server that listens at `host`. `hosts` are further names of the server, `origins` those of pages that may send requests (`*`:
    /// any page).
    pub fn new(host: &str, hosts: &[String], origins: &[String]) -> Self {
        let own = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let hosts = hosts.iter().map(String::as_str).chain([host, own.trim_end(), "localhost"]).map(str::to_owned);
        Self { hosts: hosts.collect(), origins: origins.to_vec(), is_open_to_any_host: false }
    }

    /// Accepts any `Host`, for a server with an API key, which foreign web pages do not have.
    #[must_use]
    pub fn open_to_any_host(self) -> Self {
        Self { is_open_to_any_host: true, ..self }
    }

    /// Wraps `router` with this guard. `refuse` builds the response for a refused request.
    pub fn before(self, router: Router, refuse: fn(StatusCode, String) -> Response) -> Router {
        router.layer(middleware::from_fn_with_state(Arc::new(Guarded { guard: self, refuse }), answer))
    }

    fn check_host(&self, headers: &HeaderMap) -> Result<(), GuardRefusal> {
        let allowed = |host: &HeaderValue| {
            let name = name_of(host.to_str().unwrap_or("?"));
            let is_address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok();
            let is_known = self.hosts.iter().any(|known| known.eq_ignore_ascii_case(name));
            is_address || is_known || name.to_ascii_lowercase().ends_with(".localhost")
        };
        match headers.get_all(header::HOST).iter().find(|host| !allowed(host)) {
            Some(host) if !self.is_open_to_any_host => {
                let name = name_of(host.to_str().unwrap_or("?"));
                let mend = format!("use its IP address, or start the server with --allowed_hosts {name}");
                Err((StatusCode::FORBIDDEN, format!("Host: {name} is not a known name of this server; {mend}")))
            }
            _ => Ok(()),
        }
    }

    /// The request's origin, if it is a foreign one that is allowed.
    fn check_origin<'a>(&self, headers: &'a HeaderMap) -> Result<Option<&'a HeaderValue>, GuardRefusal> {
        let Some(origin) = headers.get(header::ORIGIN) else { return Ok(None) };
        let text = origin.to_str().unwrap_or("?");
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
        if text.split_once("://").is_some_and(|(_, place)| host.is_some_and(|host| host.eq_ignore_ascii_case(place))) {
            return Ok(None);
        }
        match self.origins.iter().any(|known| known == "*" || known.eq_ignore_ascii_case(text)) {
            true => Ok(Some(origin)),
            false => {
                let message = "requests from web pages of other origins are refused; serve allows origins with \
                               --allowed_origins";
                Err((StatusCode::FORBIDDEN, format!("Origin: {text}: {message}")))
            }
        }
    }
}

async fn answer(State(guarded): State<Arc<Guarded>>, request: Request, next: Next) -> Response {
    let Guarded { guard, refuse } = &*guarded;
    let headers = request.headers();
    let origin = match guard.check_host(headers).and_then(|()| guard.check_origin(headers)) {
        Ok(origin) => origin.cloned(),
        Err((status, message)) => return refuse(status, message),
    };
    let is_preflight =
        request.method() == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match is_preflight && origin.is_some() {
        true => {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::NO_CONTENT;
            let allowed = FOR_ALLOWED_ORIGINS.map(|(name, value)| (name, HeaderValue::from_static(value)));
            response.headers_mut().extend(allowed);
            response
        }
        false => next.run(request).await,
    };
    if let Some(origin) = origin {
        response.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        response.headers_mut().insert(header::VARY, HeaderValue::from_static("origin"));
    }
    response
}

/// Refuses a request body without a content type, or with one that a web page may send anywhere without a preflight request.
///
/// # Errors
/// What is expected.
pub fn check_json_type(headers: &HeaderMap) -> Result<(), String> {
    let kind = headers.get(header::CONTENT_TYPE).map_or("none", |kind| kind.to_str().unwrap_or("?"));
    let essence = kind.split(';').next().unwrap_or_default().trim();
    match essence.eq_ignore_ascii_case("application/json") {
        true => Ok(()),
        false => Err(format!("Content-Type: {kind}: expected application/json")),
    }
}

/// The name in a `Host` header, without port and trailing dot.
fn name_of(host: &str) -> &str {
    let is_port = |rest: &str| rest.bytes().all(|byte| byte.is_ascii_digit());
    let name = host.rsplit_once(':').filter(|(_, rest)| is_port(rest)).map_or(host, |(name, _)| name);
    name.strip_suffix('.').unwrap_or(name)
}

/// Parses an origin as browsers write it: `*`, or scheme, name and port.
///
/// # Errors
/// The expected form.
pub fn parse_origin(text: &str) -> Result<String, String> {
    let is_origin = text.split_once("://").is_some_and(|(scheme, place)| {
        !scheme.is_empty() && !place.is_empty() && !place.contains(['/', '?', '#', '@', ' ', '*'])
    });
    match text == "*" || is_origin {
        true => Ok(text.to_owned()),
        false => Err("expected * or SCHEME://NAME or SCHEME://NAME:PORT, without a path".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(given: &[(HeaderName, &str)]) -> HeaderMap {
        given.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
    }

    #[test]
    fn allowed_hosts_are_addresses_local_names_and_configured_names() {
        let guard = Guard::new("gpu01", &["models.example".to_owned()], &[]);
        let status = |guard: &Guard, host: &str| {
            guard.check_host(&headers(&[(header::HOST, host)])).err().map(|(status, _)| status.as_u16())
        };
        for host in [
            "127.0.0.1:8000",
            "[::1]:8000",
            "[::1]",
            "10.0.0.7",
            "localhost",
            "LocalHost:1",
            "localhost.",
            "a.localhost:3",
            "gpu01:8000",
            "GPU01",
            "models.example:443",
        ] {
            assert_eq!(status(&guard, host), None, "{host}");
        }
        for host in [
            "evil.example:8000",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "evil-localhost",
            "gpu01.evil.example",
            "",
            "127.0.0.1:8000.evil.example",
            "127.0.0.1@evil.example",
            "a:b",
        ] {
            assert_eq!(status(&guard, host), Some(403), "{host}");
        }
        assert_eq!(status(&guard.clone().open_to_any_host(), "evil.example"), None);
        assert!(guard.check_host(&HeaderMap::new()).is_ok(), "no browser leaves it out");
        let both = headers(&[(header::HOST, "localhost"), (header::HOST, "evil.example")]);
        assert!(guard.check_host(&both).is_err() || both.len() == 1);
        let (_, message) = guard.check_host(&headers(&[(header::HOST, "evil.example:1")])).unwrap_err();
        assert!(message.contains("--allowed_hosts evil.example"), "{message}");
    }

    #[test]
    fn allowed_origins_are_the_server_itself_and_configured_ones() {
        let guard = |origins: &[&str]| {
            Guard::new("127.0.0.1", &[], &origins.iter().map(|&origin| origin.to_owned()).collect::<Vec<_>>())
        };
        let asked = |origin: &str| headers(&[(header::HOST, "localhost:8000"), (header::ORIGIN, origin)]);
        assert_eq!(guard(&[]).check_origin(&headers(&[])).unwrap(), None);
        assert_eq!(guard(&[]).check_origin(&asked("http://localhost:8000")).unwrap(), None);
        let refused = ["http://localhost:3000", "http://evil.example", "null", "https://localhost", "file://", ""];
        for origin in refused {
            assert_eq!(guard(&[]).check_origin(&asked(origin)).unwrap_err().0.as_u16(), 403, "{origin}");
            assert!(guard(&["https://chat.example"]).check_origin(&asked(origin)).is_err(), "{origin}");
            assert!(guard(&["*"]).check_origin(&asked(origin)).unwrap().is_some(), "{origin}");
        }
        assert!(guard(&["https://chat.example"]).check_origin(&asked("https://chat.example")).unwrap().is_some());
        for origin in ["chat.example", "https://", "https://chat.example/", "://x", "https://*.example"] {
            assert!(parse_origin(origin).is_err(), "{origin}");
        }
        assert!(parse_origin("*").is_ok() && parse_origin("http://localhost:3000").is_ok());
    }

    #[test]
    fn only_json_request_bodies_are_accepted() {
        let is_taken = |kind: &str| check_json_type(&headers(&[(header::CONTENT_TYPE, kind)])).is_ok();
        assert!(["application/json", "Application/JSON; charset=utf-8"].into_iter().all(is_taken));
        let others =
            ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=application/json", ""];
        assert!(!others.into_iter().any(is_taken) && check_json_type(&HeaderMap::new()).is_err());
    }
}
