// Shows the values of a chart under the mouse, under a finger, or with a slider for the keyboard, and sorts tables.
// The page is complete without this script.
"use strict";

const MILLISECONDS = { d: 86400000, h: 3600000, min: 60000, s: 1000 };

for (const figure of document.querySelectorAll("figure[data-from]")) {
  const from = Number(figure.dataset.from);
  const to = Number(figure.dataset.to);
  const drawing = figure.querySelector(".drawing");
  const heads = [...figure.querySelectorAll("thead th")].map((cell) => cell.textContent);
  let rows = null; // read at the first use, because there may be many

  const box = document.createElement("div");
  box.className = "readout";
  const slider = document.createElement("input");
  slider.type = "range";
  slider.setAttribute("aria-label", `Values of ${figure.querySelector("h3").textContent} at a ${heads[0]}`);
  const output = document.createElement("output");
  box.append(slider, output);
  drawing.append(box);
  const cursor = document.createElement("div");
  cursor.className = "cursor";
  drawing.append(cursor);

  const read = () => {
    rows ??= [...figure.querySelectorAll("tbody tr")].map((row) => [...row.children].map((cell) => cell.textContent));
    slider.min = 0;
    slider.max = rows.length - 1;
  };
  const place = (row) => Number(row[0].replaceAll(",", ""));
  const show = (index) => {
    const row = rows[index];
    const parts = heads.slice(1).map((head, column) => [head, row[column + 1]]).filter(([, value]) => value !== "–");
    const text = `${heads[0]} ${row[0]} · ${parts.map(([head, value]) => `${head}: ${value}`).join(" · ")}`;
    output.textContent = text;
    slider.setAttribute("aria-valuetext", text);
    const svg = [...drawing.querySelectorAll("svg")].find((found) => found.getBoundingClientRect().width > 0);
    const plot = svg.querySelector(".background").getBoundingClientRect();
    const frame = drawing.getBoundingClientRect();
    box.classList.add("shown");
    cursor.style.display = "block";
    cursor.style.left = `${plot.left - frame.left + (plot.width * (place(row) - from)) / (to - from)}px`;
    cursor.style.top = `${plot.top - frame.top}px`;
    cursor.style.height = `${plot.height}px`;
  };
  slider.addEventListener("focus", read);
  slider.addEventListener("input", () => {
    read();
    show(Number(slider.value));
  });
  drawing.addEventListener("pointermove", (event) => {
    read();
    const svg = [...drawing.querySelectorAll("svg")].find((found) => found.getBoundingClientRect().width > 0);
    const plot = svg.querySelector(".background").getBoundingClientRect();
    const at = from + ((to - from) * (event.clientX - plot.left)) / plot.width;
    let best = 0;
    rows.forEach((row, index) => {
      if (Math.abs(place(row) - at) < Math.abs(place(rows[best]) - at)) best = index;
    });
    slider.value = best;
    show(best);
  });
  const hide = () => {
    box.classList.remove("shown");
    cursor.style.display = "none";
  };
  slider.addEventListener("blur", hide);
  drawing.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
  document.addEventListener("pointerdown", (event) => drawing.contains(event.target) || hide()); // after a finger
  slider.value = 0;
}

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  table.querySelectorAll("thead th").forEach((head) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const column = head.cellIndex;
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => {
        const text = row.cells[column].textContent.replaceAll(",", "");
        const parts = [...text.matchAll(/([\d.]+) (d|h|min|s)\b/g)];
        const value = parts.length
          ? parts.reduce((sum, [, count, unit]) => sum + count * MILLISECONDS[unit], 0)
          : Number.parseFloat(text);
        return [Number.isNaN(value) ? Infinity : value, text]; // what is no number comes after all numbers
      };
      const order = (a, b) => {
        const [[left, leftText], [right, rightText]] = [key(a), key(b)];
        return left === right ? leftText.localeCompare(rightText, "en", { numeric: true }) : left - right;
      };
      body.append(...[...body.rows].sort((a, b) => (down ? order(b, a) : order(a, b))));
    });
  });
}
