"use strict";
(() => {
  const data = JSON.parse(document.getElementById("__data").textContent);
  const dialog = document.getElementById("__origin");
  const body = document.getElementById("__origin-body");

  const make = (tag, text, ...children) => {
    const element = document.createElement(tag);
    if (text) element.textContent = text;
    element.append(...children);
    return element;
  };
  const short = (value) => (value === null ? "–" : String(Number(value.toPrecision(6))));

  // What many files share is stored once.
  const told = (place) => {
    const file = data.origins.files[place];
    if (typeof file !== "object" || file === null) return file;
    return Object.fromEntries(Object.entries(file).map(([name, value]) =>
      [name, value !== null && typeof value === "object" && "$" in value
        ? data.origins.shared[value.$] : value]));
  };

  const describe = (key) => {
    const [model, sharing, method, target, compression, width, rft, metric, eps] = key;
    const parts = [data.labels[model] ?? model];
    if (sharing === "head" || sharing === "all") parts.push(`filters shared by ${sharing === "all" ? "all" : "a head"}`);
    if (method) parts.push(data.labels[method] ?? method);
    if (target && target !== "kq") parts.push(target === "k" ? "by keys" : "by queries");
    if (compression) parts.push(`${100 * compression} % cut`);
    if (width) parts.push(`d_k ${width}`);
    if (eps === "matched") parts.push("eps matched");
    if (rft.startsWith("refit")) parts.push("refitted");
    if (rft.endsWith("post")) parts.push("recovered");
    return `${metric}: ${parts.join(", ")}`;
  };

  const facts = (pairs) => {
    const list = make("dl");
    list.className = "facts";
    for (const [name, value] of pairs) {
      if (value === undefined || value === null || value === "") continue;
      list.append(make("dt", name), make("dd", Array.isArray(value) ? value.join(", ") || "none" : String(value)));
    }
    return list;
  };

  const verdict = (place, table) => {
    const judged = data.judged[table]?.[place];
    if (!judged) return [];
    const [paper, difference, tolerance, word, why, errata] = judged;
    return [
      ["The paper’s", short(paper)],
      ["Difference", difference === null ? null : short(difference)],
      ["Tolerance", tolerance === null ? null : short(tolerance)],
      ["Verdict", why ? `${word}: ${why}` : word],
      ["Errata", errata],
    ];
  };

  const versions = (of) => of && Object.entries(of).map(([name, version]) => `${name} ${version}`);

  // The files behind one draw of a number: what was measured first, how its model was made after.
  const result = ([draw, value, stderr, reason, files, making], timed) => {
    const measured = files.map(told);
    const places = [...files, ...(making === null ? [] : data.made[making])];
    const made = making === null ? [] : data.made[making].map(told);
    const selection = made.find((one) => one.full_width);
    const record = measured[0] ?? {};
    const ran = measured[1] ?? {};
    const machine = record.machine ?? record;
    const section = make("section", "",
      make("h3", `${draw}: ${value === null ? reason : short(value)}${stderr === null ? "" : ` ± ${short(stderr)} (standard error over ${timed ? "repeats" : "documents"})`}`),
      facts([
        ["File", files.length ? data.origins.paths[files[0]] : null],
        ["Checkpoint", record.model],
        ["Selection", selection && `${selection.method} on ${selection.target}, ${selection.width} of ${selection.full_width} channels`],
        ["Calibration seed", selection?.calibration?.seed ?? selection?.seed],
        ["Device", ran.gpus?.length ? ran.gpus : machine.gpu ?? machine.device],
        ["Machine", ran.machine],
        ["Started", ran.started],
        ["Took", ran.seconds === undefined ? null : `${ran.seconds} s`],
        ["Commit", ran.commit],
        ["Software", versions(machine.versions ?? ran.versions)],
      ]));
    for (const place of places) {
      section.append(make("details", "",
        make("summary", data.origins.paths[place]),
        make("pre", JSON.stringify(told(place), null, 1))));
    }
    return section;
  };

  const show = (place, table) => {
    document.getElementById("__origin-title").textContent = describe(data.keys[place]);
    const timed = data.keys[place][5] !== null;  // only timings name a width
    body.replaceChildren(facts(verdict(place, table)), ...data.numbers[place].map((one) => result(one, timed)));
    dialog.showModal();
    dialog.scrollTop = 0;
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-cell]");
    if (button) show(Number(button.dataset.cell), button.closest("[data-table]").dataset.table);
    if (event.target === dialog) dialog.close();  // the backdrop
  });

  document.addEventListener("change", (event) => {
    if (event.target.name === "show") document.body.dataset.show = event.target.value;
  });

  // A hint where a table or a figure is wider than the page.
  const hint = () => {
    for (const part of document.querySelectorAll(".wide")) {
      part.classList.toggle("scrolls", part.scrollWidth > part.clientWidth);
    }
  };
  addEventListener("resize", hint);
  hint();

  // One stop of the Tab key a table; arrows go from number to number.
  const steps = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
  for (const table of document.querySelectorAll("table.results")) {
    const rows = [...table.tBodies[0].rows]
      .map((row) => [...row.querySelectorAll("button[data-cell]")])
      .filter((row) => row.length);
    rows.flat().forEach((button, i) => { button.tabIndex = i ? -1 : 0; });
    table.addEventListener("keydown", (event) => {
      const step = steps[event.key];
      const row = rows.findIndex((one) => one.includes(event.target));
      if (!step || row < 0) return;
      event.preventDefault();
      const into = rows[Math.min(Math.max(row + step[0], 0), rows.length - 1)];
      const column = rows[row].indexOf(event.target) + step[1];
      const next = into[Math.min(Math.max(column, 0), into.length - 1)];
      event.target.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  }
})();
