//! Checks the output of the program on a terminal and in a file.

use std::process::Command;

use crate::program::{SMALL_RUN, command};

/// Runs a command on a pseudo-terminal with 24 rows, and prints everything that it writes there. The first argument is the number of columns. When
/// `step 1/` appears, the terminal is resized to the second argument.
const TERMINAL: &str = "
import fcntl, os, pty, struct, sys, termios
columns, later = int(sys.argv[1]), int(sys.argv[2])
pid, terminal = pty.fork()
def resize(file, columns):
    fcntl.ioctl(file, termios.TIOCSWINSZ, struct.pack('HHHH', 24, columns, 0, 0))
if pid == 0:
    resize(1, columns)
    os.execvp(sys.argv[3], sys.argv[3:])
try:
    while data := os.read(terminal, 65536):
        sys.stdout.buffer.write(data)
        if later != columns and b'step 1/' in data:
            resize(terminal, later)
            columns = later
            sys.stdout.buffer.write(b'<resized>')
except OSError:
    pass
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
";

/// Marks in the output the moment of the resize.
const RESIZED: &str = "<resized>";

/// Emulates a terminal. Returns the final lines, including scrolled ones, and every line that was ever visible. Supports the control codes that the
/// program may send: line ends, colors, cursor up and erase to the end.
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
                    Some('M') => {
                        let num_deleted = code.trim_matches(['[', 'M']).parse::<usize>().unwrap();
                        lines.drain(row..lines.len().min(row + num_deleted));
                    }
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

/// The program's output on a terminal of 80 columns; its exit code must be `code`.
fn on_terminal(line: &str, code: i32) -> String {
    on_terminal_of((80, 80), line, code)
}

/// The program's output on a terminal with the given columns at the start and after its first step.
fn on_terminal_of(columns: (usize, usize), line: &str, code: i32) -> String {
    let output = terminal(columns, &[], line).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(code), "{text}");
    text
}

/// A command that runs the program on a terminal, through the `shell` command.
fn terminal((columns, later): (usize, usize), shell: &[&str], line: &str) -> Command {
    let own = command(line);
    let mut terminal = Command::new("python3");
    terminal.args(["-c", TERMINAL, &columns.to_string(), &later.to_string()]).args(shell);
    terminal.arg(own.get_program()).args(own.get_args());
    if let Some(root) = own.get_current_dir() {
        terminal.current_dir(root);
    }
    for (name, value) in own.get_envs() {
        _ = match value {
            Some(value) => terminal.env(name, value),
            None => terminal.env_remove(name),
        };
    }
    terminal
}

fn has(lines: &[String], parts: &[&str]) -> bool {
    lines.iter().any(|line| parts.iter().all(|part| line.contains(part)))
}

#[test]
fn an_evaluation_shows_progress_and_prints_its_result() {
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
fn a_terminal_has_one_status_and_keeps_lines_of_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let text = on_terminal(&format!("--nproc 2 {SMALL_RUN} max_steps=3 output_dir={}", folder.path().display()), 0);
    let (last, ever) = shown(&text);
    assert!(has(&last, &["[rank 1]", "the KV cache has"]), "a line of rank 1 stays\n{text}");
    assert!(has(&last, &["model: "]) && has(&last, &["report: "]), "results stay\n{text}");
    assert!(!has(&last, &["━"]) && !has(&last, &["╌"]), "the status is gone in the end: {last:#?}");
    assert!(has(&last, &["step 3/3 | reward ", "s/step ", " | 0:0"]), "the last step stays: {last:#?}");
    let statuses: Vec<&String> = ever.iter().filter(|line| line.contains('╌') || line.contains('━')).collect();
    for parts in [&["step 0/3 ╌"][..], &["step 1/3 ━", " < "], &["generate ━", "2/2 groups", "tokens/s a rank"]] {
        assert!(statuses.iter().any(|line| parts.iter().all(|part| line.contains(part))), "{parts:?}: {statuses:#?}");
    }
    assert!(statuses.iter().all(|line| line.chars().count() < 80), "{statuses:#?}");
    assert!(!text.contains('\u{1e}'), "no record of a worker reaches the terminal");
}

#[test]
fn resizing_a_terminal_leaves_no_remains_of_the_status() {
    let folder = tempfile::tempdir().unwrap();
    let run =
        |name: &str| format!("--nproc 2 {SMALL_RUN} max_steps=3 output_dir={}", folder.path().join(name).display());
    let (_, ever) = shown(&on_terminal_of((200, 200), &run("wide"), 0));
    let parts = ["step 2/3 ━", "reward ", "loss ", "length ", "s/step ", "entropy "];
    assert!(has(&ever, &parts), "{ever:#?}");

    let text = on_terminal_of((200, 40), &run("narrower"), 0);
    let resized = text.find(RESIZED).expect("it was resized");
    let text = text.replace(RESIZED, "");
    let erase = regex::Regex::new(r"\r\x1b\[(\d+)A\x1b\[\d+M\x1b\[J").unwrap();
    let (mut widths, mut from, mut took_wrapped_rows) = (Vec::<usize>::new(), 0, false);
    for found in erase.captures_iter(&text) {
        let whole = found.get(0).unwrap();
        widths.extend(text[from..whole.start()].lines().map(|line| line.chars().count()));
        from = whole.end();
        let num_rows = found[1].parse::<usize>().unwrap();
        let rows = widths.iter().rev().scan(0, |rows, width: &usize| {
            *rows += width.div_ceil(40);
            Some(*rows)
        });
        let num_lines = rows.take_while(|rows| *rows <= num_rows).enumerate().find(|(_, rows)| *rows == num_rows);
        took_wrapped_rows |= from > resized && num_lines.is_some_and(|(lines_before, _)| lines_before + 1 < num_rows);
    }
    assert!(took_wrapped_rows, "the terminal had wrapped the bars\n{text}");
    let last = text.lines().rev().find(|line| line.contains(['━', '╌'])).unwrap();
    let last = last.rsplit('J').next().unwrap();
    assert!(last.chars().count() < 40, "{last}\n{text}");
}

#[test]
fn output_to_a_file_has_plain_lines_only() {
    let folder = tempfile::tempdir().unwrap();
    let run =
        |name: &str| format!("--nproc 2 {SMALL_RUN} max_steps=3 output_dir={}", folder.path().join(name).display());
    let piped = command(&run("piped")).output().unwrap();
    let lines = String::from_utf8(piped.stderr).unwrap();
    assert!(piped.status.success() && lines.contains("Z step 3/3 | reward "), "{lines}");
    let is_plain = |c: char| !c.is_control() || c == '\n';
    assert!(lines.chars().all(is_plain) && !lines.contains(['━', '╌']) && !lines.contains("\"key\""), "{lines}");

    let saved = folder.path().join("saved.txt");
    let whole = format!("exec \"$0\" \"$@\" > '{}'", saved.display());
    let output = terminal((80, 80), &["sh", "-c", &whole], &run("saved")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (last, _) = shown(&text);
    let count = |words: &str| last.iter().filter(|line| line.contains(words)).count();
    assert_eq!((count("step 3/3 | reward "), count("report: "), count("model: ")), (1, 1, 1), "{last:#?}");
    assert!(std::fs::read_to_string(saved).unwrap().contains("report: "), "{text}");
}
