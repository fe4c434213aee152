// The values of the nearest step, under the pointer or by the arrow keys. Text goes in as text only.
function readable(plot) {
  const { from, to, left, right, lines } = JSON.parse(plot.dataset.plot);
  const [svg, rule, tip] = [plot.querySelector("svg"), plot.querySelector(".rule"), plot.querySelector(".tip")];
  const nearest = (points, step) =>
    points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
  const steps = [...new Set(lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
  let shown = null;
  const hide = () => {
    shown = null;
    rule.style.visibility = "hidden";
    tip.style.display = "none";
  };
  const show = (step) => {
    shown = step;
    const box = svg.getBoundingClientRect();
    const rows = [Object.assign(document.createElement("div"), { textContent: `step ${step}` })];
    lines.forEach((line, index) => {
      const point = nearest(line.points, step);
      if (point[0] !== step) return;
      const row = document.createElement("div");
      row.className = `s${index}`;
      const text = Object.assign(document.createElement("span"), { textContent: `${line.label} ${point[1]}` });
      row.append(document.createElement("i"), text);
      rows.push(row);
    });
    tip.replaceChildren(...rows);
    const at = left + ((step - from) / (to - from)) * (right - left);
    rule.setAttribute("x1", at);
    rule.setAttribute("x2", at);
    rule.style.visibility = "visible";
    tip.style.display = "block";
    const flips = at > (left + right) / 2;
    tip.style.left = `${box.left - plot.getBoundingClientRect().left + (at / svg.viewBox.baseVal.width) * box.width + (flips ? -12 : 12)}px`;
    tip.style.transform = flips ? "translateX(-100%)" : "";
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const wanted = from + ((x - left) / (right - left)) * (to - from);
    show(nearest(steps.map((step) => [step]), wanted)[0]);
  });
  svg.addEventListener("keydown", (event) => {
    const last = steps.length - 1;
    const place = shown === null ? last : steps.indexOf(shown);
    const keys = { ArrowLeft: place - (shown === null ? 0 : 1), ArrowRight: place + 1, Home: 0, End: last };
    if (event.key === "Escape") hide();
    if (!(event.key in keys)) return;
    event.preventDefault();
    show(steps[Math.max(0, Math.min(last, keys[event.key]))]);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
}
document.querySelectorAll(".plot").forEach(readable);
