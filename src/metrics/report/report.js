// Under the pointer, the values of the nearest step. Text goes in as text only.
for (const plot of document.querySelectorAll(".plot")) {
  const { from, to, left, right, lines } = JSON.parse(plot.dataset.plot);
  const [svg, rule, tip] = [plot.querySelector("svg"), plot.querySelector(".rule"), plot.querySelector(".tip")];
  const nearest = (points, step) =>
    points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const wanted = from + ((x - left) / (right - left)) * (to - from);
    const step = nearest(lines.flatMap((line) => line.points), wanted)[0];
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
  });
  svg.addEventListener("pointerleave", () => {
    rule.style.visibility = "hidden";
    tip.style.display = "none";
  });
}
