//! What a person sees on a terminal of 80 columns.

use std::process::Command;

use crate::program::{SMALL_RUN, command};

/// Runs its arguments on a terminal of 80 columns and passes on all that they write there.
const TERMINAL: &str = "
import fcntl, os, pty, struct, sys, termios
pid, terminal = pty.fork()
if pid == 0:
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 80, 0, 0))
    os.execvp(sys.argv[1], sys.argv[1:])
try:
    while data := os.read(terminal, 65536):
        sys.stdout.buffer.write(data)
except OSError:
    pass
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
";

/// The lines that a terminal shows in the end, scrolled ones included, and every line that it has ever shown. Knows what the program
/// may send: line ends, colours, `up` and `erase to the end`.
fn shown(output: &str) -> (Vec<String>, Vec<String>) {
    let (mut lines, mut row, mut column, mut ever) = (vec![String::new()], 0, 0, Vec::new());
    let mut rest = output.chars();
    while let Some(c) = rest.next() {
        match c {
            '\r' => column = 0,
            '\n' => {
                ever.push(lines[row].clone());
                row += 1;
                if row == lines.len() {
                    lines.push(String::new());
                }
            }
            '\x1b' => {
                let mut code = String::new();
                let end = rest.by_ref().inspect(|c| code.push(*c)).find(char::is_ascii_alphabetic);
                match end {
                    Some('A') => row -= code.trim_matches(['[', 'A']).parse::<usize>().unwrap(),
                    Some('J') => {
                        assert_eq!(column, 0, "only whole lines are erased");
                        lines.truncate(row);
                        lines.push(String::new());
                    }
                    Some('m') => {}
                    other => panic!("{other:?}"),
                }
            }
            c => {
                let mut text: Vec<char> = lines[row].chars().collect();
                text.resize(text.len().max(column + 1), ' ');
                text[column] = c;
                lines[row] = text.into_iter().collect();
                column += 1;
            }
        }
    }
    (lines, ever)
}

/// What the program writes to a terminal; it has to end with `code`.
fn on_terminal(line: &str, code: i32) -> String {
    let own = command(line);
    let mut terminal = Command::new("python3");
    terminal.args(["-c", TERMINAL]).arg(own.get_program()).args(own.get_args());
    if let Some(root) = own.get_current_dir() {
        terminal.current_dir(root);
    }
    for (name, value) in own.get_envs() {
        _ = match value {
            Some(value) => terminal.env(name, value),
            None => terminal.env_remove(name),
        };
    }
    let output = terminal.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(code), "{text}");
    text
}

fn has(lines: &[String], parts: &[&str]) -> bool {
    lines.iter().any(|line| parts.iter().all(|part| line.contains(part)))
}

#[test]
fn an_evaluation_says_how_far_it_is_and_leaves_its_result() {
    let rows = "--data configs/arithmetic/eval.jsonl --max_completion_length 2 --device cpu";
    let eval = format!("--model configs/arithmetic/model {rows}");
    let text = on_terminal(&format!("eval --nproc 2 {eval}"), 0);
    let (last, ever) = shown(&text);
    assert!(has(&ever, &["eval ╌", "0/100 problems"]), "the first rank's half of the problems\n{text}");
    assert!(!has(&last, &["━"]) && !has(&last, &["╌"]), "the status is gone in the end: {last:#?}");
    assert!(has(&last, &["\"problems\":200"]), "{text}");
    for ranks in [1, 2] {
        let failed = on_terminal(&format!("eval --nproc {ranks} {eval} --fault 0:0:generate:error"), 10);
        let (last, ever) = shown(&failed);
        assert!(has(&ever, &["eval ╌"]) && has(&last, &["generate: injected fault"]), "{failed}");
        assert!(!has(&last, &["╌"]), "the status is gone: {last:#?}");
    }
}

#[test]
fn a_terminal_has_one_status_and_loses_no_line_of_any_rank() {
    let folder = tempfile::tempdir().unwrap();
    let text = on_terminal(&format!("--nproc 2 {SMALL_RUN} max_steps=3 output_dir={}", folder.path().display()), 0);
    let (last, ever) = shown(&text);
    assert!(has(&last, &["[rank 1]", "the KV cache has"]), "a line of rank 1 stays\n{text}");
    assert!(has(&last, &["model: "]) && has(&last, &["report: "]), "results stay\n{text}");
    assert!(!has(&last, &["━"]) && !has(&last, &["╌"]), "the status is gone in the end: {last:#?}");
    assert!(has(&last, &["step 3/3 | reward ", "s/step ", " | 0:0"]), "the last step stays: {last:#?}");
    let statuses: Vec<&String> = ever.iter().filter(|line| line.contains('╌') || line.contains('━')).collect();
    for parts in [&["step 0/3 ╌"][..], &["step 1/3 ━", " < "], &["generate ━", "2/2 groups", "tokens/s a GPU"]] {
        assert!(statuses.iter().any(|line| parts.iter().all(|part| line.contains(part))), "{parts:?}: {statuses:#?}");
    }
    assert!(statuses.iter().all(|line| line.chars().count() < 80), "{statuses:#?}");
    assert!(!text.contains('\u{1e}'), "no record of a worker reaches the terminal");
}
