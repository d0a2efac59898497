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

  const describe = (key) => {
    const [model, sharing, method, target, compression, keys, rft, metric, eps, values] = key;
    const parts = [data.labels[model] ?? model];
    if (sharing === "head" || sharing === "all") parts.push(`filters shared by ${sharing === "all" ? "all" : "a head"}`);
    if (method) parts.push(data.labels[method] ?? method);
    if (target && target !== "kq") parts.push(target === "k" ? "by keys" : "by queries");
    if (compression) parts.push(`${100 * compression} % cut`);
    if (keys) parts.push(`d_k ${keys}`);
    if (values) parts.push(`d_v ${values}`);
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

  const verdict = (judged) => {
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

  // A draw of a number: what was measured, and how its model was made.
  const result = ([draw, value, stderr, reason, file, variant], timed) => {
    const source = data.sources[file] ?? {};
    const error = stderr === null ? "" : ` ± ${short(stderr)} (standard error over ${timed ? "repeats" : "documents"})`;
    return make("section", "",
      make("h3", `${draw}: ${value === null ? reason : short(value)}${error}`),
      facts([
        ["File", file],
        ["Model digest", source.model],
        ["Device", source.device],
        ["Started", source.started],
        ["Commit", source.commit],
        ["Software", source.versions],
        ["Made in steps", data.steps[variant]],
      ]));
  };

  const show = ([key, judged, draws]) => {
    document.getElementById("__origin-title").textContent = describe(key);
    const [, , , target, , width] = key;
    const timed = width !== null && !target;  // what was cut has a target
    body.replaceChildren(facts(verdict(judged)), ...draws.map((one) => result(one, timed)));
    dialog.showModal();
    dialog.scrollTop = 0;
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-cell]");
    if (button) show(data.numbers[button.dataset.cell]);
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
})();
