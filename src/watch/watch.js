
// Asks the server every second what is new. Parts of the page come as HTML whose text the server has escaped.
const byId = (id) => document.getElementById(id);
const form = byId("form");
const shown = { parts: {}, revision: "", runs: "", newest: "", asked: 0 };
let page = 0;

async function ask(path, fields) {
  const response = await fetch(`${path}?${new URLSearchParams(fields)}`);
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.error.message), { isAnswer: true });
  return answer;
}

// Changes only what differs, so that a reader's place, selection and focus stay.
function put(id, html) {
  if (shown.parts[id] === html) return false;
  shown.parts[id] = html;
  byId(id).innerHTML = html;
  return true;
}

function say(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

// What stands behind # in the address: the runs shown, at the start also the form's fields and a place to go to.
const address = () => new URLSearchParams(location.hash.slice(1));
const wanted = () => address().get("runs") ?? "";

function showRuns({ runs, selected }) {
  const list = byId("runs");
  const names = JSON.stringify(runs.map((run) => run.name));
  if (shown.runs !== names) {
    shown.runs = names;
    list.querySelectorAll("label").forEach((label) => label.remove());
    for (const run of runs) {
      const label = document.createElement("label");
      const box = Object.assign(document.createElement("input"), { type: "checkbox", value: run.id });
      box.addEventListener("change", () => {
        const boxes = [...list.querySelectorAll("input:checked")].map((box) => box.value);
        history.replaceState(null, "", `#runs=${boxes.join(",")}`);
        poll();
      });
      label.append(box, document.createElement("b"), document.createElement("span"));
      list.append(label);
    }
    for (const name of ["run", "other_run"]) {
      const select = form.elements[name];
      const kept = select.value;
      [...select.options].filter((option) => option.value !== "").forEach((option) => option.remove());
      runs.forEach((run) => select.add(new Option(run.name, run.id)));
      select.value = kept || (name === "run" ? String(selected[0] ?? "") : "");
    }
    for (const [name, value] of address()) {
      if (form.elements[name] && !shown.asked) form.elements[name].value = value;
    }
  }
  list.querySelectorAll("label").forEach((label, index) => {
    const run = runs[index];
    const [box, name, rest] = label.children;
    if (document.activeElement !== box) box.checked = selected.includes(run.id);
    const steps = run.max_steps ? `step ${run.step} of ${run.max_steps}` : `step ${run.step}`;
    const text = [run.state, steps, run.reward === null ? "" : `reward ${run.reward}`, ...run.messages].filter(Boolean).join(" · ");
    if (name.textContent !== run.name) name.textContent = run.name;
    if (rest.textContent !== text) rest.textContent = text;
  });
}

function showCharts(answer) {
  for (const id of ["tiles", "metrics", "configuration"]) put(id, answer[id]);
  const charts = [...byId("charts").querySelectorAll("svg")];
  const focused = charts.indexOf(document.activeElement);
  if (put("charts", answer.charts)) {
    document.querySelectorAll("#charts .plot").forEach(readable);
    byId("charts").querySelectorAll("svg")[focused]?.focus({ preventScroll: true });
  }
  shown.revision = answer.revision;
}

async function showCompletions() {
  const turn = ++shown.asked;
  const fields = Object.fromEntries(new FormData(form));
  if (!fields.run) return;
  try {
    const answer = await ask("/completions", { ...fields, page });
    if (turn !== shown.asked) return; // a later question is under way
    put("completions", answer.html);
    say("completions-message", "");
    if (turn === 1) byId(address().get("at"))?.scrollIntoView();
    say("page", answer.num_pages > 0 ? `${answer.page + 1} of ${answer.num_pages}` : "");
    byId("pages").hidden = answer.num_pages < 2;
    byId("previous").disabled = page === 0;
    byId("next").disabled = page + 1 >= answer.num_pages;
    for (const id of ["before", "after"]) {
      byId(id).disabled = answer[id] === null;
      byId(id).dataset.step = answer[id] ?? "";
    }
  } catch (error) {
    if (turn !== shown.asked) return;
    put("completions", "");
    byId("pages").hidden = true;
    say("completions-message", error.message);
  }
}

let timer;
let polls = 0;
async function poll() {
  clearTimeout(timer);
  const turn = ++polls;
  try {
    const live = await ask("/live", { runs: wanted() });
    if (turn !== polls) return;
    showRuns(live);
    say("message", live.message || (live.runs.length === 1 ? "1 run" : `${live.runs.length} runs`));
    put("ranks", live.ranks);
    put("warnings", live.warnings);
    if (live.revision !== shown.revision) showCharts(await ask("/charts", { runs: live.selected.join(",") }));
    const asked = live.runs.filter((run) => [form.elements.run.value, form.elements.other_run.value].includes(String(run.id)));
    const newest = JSON.stringify(asked.map((run) => [run.id, run.newest, run.num_completions]));
    const follows = !form.elements.step.value || (form.elements.other_run.value && !form.elements.other_step.value);
    if (newest !== shown.newest && (follows || !shown.newest)) showCompletions();
    shown.newest = newest;
  } catch (error) {
    say("message", error.isAnswer ? error.message : "no answer: colo-grpo watch has ended or cannot be reached; trying again");
  }
  if (turn === polls) timer = setTimeout(poll, document.hidden ? 10000 : 1000);
}

let typing;
form.addEventListener("input", () => {
  page = 0;
  clearTimeout(typing);
  typing = setTimeout(showCompletions, 250);
});
form.addEventListener("submit", (event) => event.preventDefault());
for (const id of ["before", "after"]) {
  byId(id).addEventListener("click", () => {
    form.elements.step.value = byId(id).dataset.step;
    page = 0;
    showCompletions();
  });
}
for (const [id, by] of [["previous", -1], ["next", 1]]) {
  byId(id).addEventListener("click", () => {
    page += by;
    showCompletions();
    byId("completions-title").scrollIntoView();
  });
}
addEventListener("hashchange", poll);
document.addEventListener("visibilitychange", () => document.hidden || poll());
poll();
