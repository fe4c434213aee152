//! HTTP routes and responses.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use axum::routing::get;
use serde_json::{Value, json};

use super::page;
use super::query::Query;
use super::runs::{WatchedRun, WatchedRuns};
use super::samples::{SampleFilter, SampleKind, SampleTables, compared, page as sample_page};
use crate::http::Guard;

/// State of the server. Requests lock it one at a time, because they all come from one person's browser.
#[derive(Debug)]
struct Watched {
    runs: WatchedRuns,
    tables: SampleTables,
}

type Shared = Arc<Mutex<Watched>>;
/// The steps before and after a step, if they exist.
type Around = (Option<u64>, Option<u64>);
/// An HTTP status and an error message.
type Refused = (StatusCode, String);

/// The router of a server that watches the runs below `folders`; `guard` checks hosts and origins.
pub fn router(folders: Vec<PathBuf>, guard: Guard) -> Router {
    let watched = Watched { runs: WatchedRuns::new(folders), tables: SampleTables::default() };
    let router = Router::new()
        .route("/", get(async || answer("text/html; charset=utf-8", page::whole())))
        .route("/live", get(live))
        .route("/charts", get(charts))
        .route("/completions", get(completions))
        .fallback(async || refusal((StatusCode::NOT_FOUND, "no such path; the page is at /".to_owned())))
        .method_not_allowed_fallback(async || {
            refusal((StatusCode::METHOD_NOT_ALLOWED, "only GET is supported".to_owned()))
        })
        .with_state(Arc::new(Mutex::new(watched)));
    guard.before(router, |status, message| refusal((status, message)))
}

async fn live(State(shared): State<Shared>, request: Request) -> Response {
    json_answer(shared, request, |watched, query| {
        watched.runs.search();
        let selected = selected(&mut watched.runs, query);
        let all: Vec<Value> = (0..watched.runs.search().len())
            .filter_map(|number| watched.runs.look(number).map(|run| page::run_line(number, run)))
            .collect();
        let runs = chosen(&watched.runs, &selected);
        Ok(json!({
            "runs": all,
            "selected": selected,
            "message": watched.runs.message(),
            "ranks": page::ranks(&runs),
            "warnings": page::warnings(&runs),
            "revision": revision(&runs),
        }))
    })
    .await
}

async fn charts(State(shared): State<Shared>, request: Request) -> Response {
    json_answer(shared, request, |watched, query| {
        watched.runs.search();
        let selected = selected(&mut watched.runs, query);
        let runs = chosen(&watched.runs, &selected);
        Ok(json!(page::charts(&runs, revision(&runs))))
    })
    .await
}

async fn completions(State(shared): State<Shared>, request: Request) -> Response {
    json_answer(shared, request, |Watched { runs, tables }, query| {
        runs.search();
        let filter = SampleFilter {
            text: query.get("text").unwrap_or_default().to_owned(),
            kind: SampleKind::new(query.get("kind").unwrap_or_default()),
        };
        let page = query.number("page").map_err(bad_request)?.unwrap_or(0) as usize;
        let mut side = |run: &str, step: &str| {
            let number = query.number(run).map_err(bad_request)?.unwrap_or(0) as usize;
            let unknown = || (StatusCode::NOT_FOUND, format!("{run} = {number}: there is no such run"));
            let run = runs.look(number).ok_or_else(unknown)?;
            let wanted = query.number(step).map_err(bad_request)?;
            let (step, around) = step_of(run, wanted)?;
            let rows = tables.read(&run.folder, step).map_err(|message| (StatusCode::NOT_FOUND, message))?;
            Ok((format!("{}, step {step}", run.name), step, around, rows))
        };
        let (title, step, (before, after), rows) = side("run", "step")?;
        let (html, num_pages) = match query.get("other_run").is_some() {
            true => {
                let (other_title, _, _, others) = side("other_run", "other_step")?;
                compared([&title, &other_title], [&rows, &others], &filter, page)
            }
            false => sample_page(&title, &rows, &filter, page),
        };
        Ok(json!({"html": html, "step": step, "before": before, "after": after, "page": page, "num_pages": num_pages}))
    })
    .await
}

/// The step whose completions are shown, `wanted` or the latest, and the steps before and after it.
fn step_of(run: &WatchedRun, wanted: Option<u64>) -> Result<(u64, Around), Refused> {
    let no_completions = || {
        let why = "set log_completions = true to keep them";
        (StatusCode::NOT_FOUND, format!("{} has no completions: {why}", run.name))
    };
    let (first, last) = (run.steps.first().ok_or_else(no_completions)?, run.steps.last().ok_or_else(no_completions)?);
    let step = wanted.unwrap_or(*last);
    let Ok(place) = run.steps.binary_search(&step) else {
        let name = &run.name;
        return Err((
            StatusCode::NOT_FOUND,
            format!("{name} has no completions of step {step}, only of some steps from {first} to {last}"),
        ));
    };
    Ok((step, (place.checked_sub(1).map(|place| run.steps[place]), run.steps.get(place + 1).copied())))
}

/// Numbers of the runs to show: those in the query, or else the most recently updated one.
fn selected(runs: &mut WatchedRuns, query: &Query) -> Vec<usize> {
    let num_runs = runs.search().len();
    let mut asked: Vec<usize> = query.numbers("runs").into_iter().filter(|number| *number < num_runs).collect();
    asked.dedup();
    if asked.is_empty() {
        let mut newest = |number: &usize| runs.look(*number).map_or(0.0, WatchedRun::newest);
        let newest = (0..num_runs).map(|number| (newest(&number), number)).max_by(|a, b| a.0.total_cmp(&b.0));
        asked.extend(newest.map(|(_, number)| number));
    }
    for number in &asked {
        runs.look(*number);
    }
    asked
}

fn chosen<'a>(runs: &'a WatchedRuns, selected: &[usize]) -> Vec<(usize, &'a WatchedRun)> {
    selected.iter().filter_map(|number| Some((*number, runs.get(*number)?))).collect()
}

/// A text that changes whenever the charts change.
fn revision(runs: &[(usize, &WatchedRun)]) -> String {
    runs.iter().map(|(number, run)| format!("{number}.{} ", run.revision())).collect()
}

/// Computes a JSON response on a thread that may block on file reads.
async fn json_answer(
    shared: Shared,
    request: Request,
    work: impl FnOnce(&mut Watched, &Query) -> Result<Value, Refused> + Send + 'static,
) -> Response {
    let query = Query::new(request.uri().query().unwrap_or_default());
    let work = move || work(&mut shared.lock().unwrap_or_else(PoisonError::into_inner), &query);
    let failed = |error: tokio::task::JoinError| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
    match tokio::task::spawn_blocking(work).await.map_err(failed).and_then(|outcome| outcome) {
        Ok(value) => answer("application/json", value.to_string()),
        Err(refused) => refusal(refused),
    }
}

fn bad_request(message: String) -> Refused {
    (StatusCode::BAD_REQUEST, message)
}

fn refusal((status, message): Refused) -> Response {
    let mut response = answer("application/json", json!({"error": {"message": message}}).to_string());
    *response.status_mut() = status;
    response
}

fn answer(kind: &'static str, body: String) -> Response {
    let mut response = Response::new(Body::from(body));
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_FRAME_OPTIONS, "DENY"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    if let Ok(policy) = HeaderValue::from_str(page::policy()) {
        headers.insert(header::CONTENT_SECURITY_POLICY, policy);
    }
    response
}
