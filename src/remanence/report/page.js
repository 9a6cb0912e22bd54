"use strict";
// Draws the figures whose data stand in this page, fits them to screen, theme and paper, and saves their data as CSV.
(() => {
  const THEMES = {
    light: { ink: "#22252a", rule: "#dcdee2", card: "#ffffff" },
    dark: { ink: "#d5d8dc", rule: "#33373d", card: "#1d2024" },
  };
  const PAPER_WIDTH = 690; // CSS pixels between the margins of a printed page
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const print = matchMedia("print");
  const touch = matchMedia("(pointer: coarse)");
  const figures = [...document.querySelectorAll("figure")].map((element) => ({
    name: element.id,
    plot: element.querySelector(".plot"),
    button: element.querySelector(".csv"),
    content: JSON.parse(element.querySelector("script").textContent),
  }));

  const axes = (layout) => Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key));

  const theme = (layout, printing) => {
    const { ink, rule, card } = THEMES[dark.matches && !printing ? "dark" : "light"];
    const changes = { "font.color": ink, "hoverlabel.bgcolor": card, "hoverlabel.bordercolor": rule, "hoverlabel.font.color": ink };
    for (const axis of axes(layout)) {
      for (const line of ["gridcolor", "linecolor", "zerolinecolor"]) changes[`${axis}.${line}`] = rule;
    }
    return changes;
  };

  // Panels of a map stand in two columns where there is room; lengths are in pixels until the last step.
  const arrange = (meta, width) => {
    const names = meta.gap + 30; // beside each panel
    const columns = meta.panels > 1 && width - 2 * names >= 440 ? 2 : 1;
    const rows = Math.ceil(meta.panels / columns);
    const [top, title, gap] = [44, meta.panels > 1 ? 26 : 6, 52];
    const inner = rows * (meta.panel + title + gap) - gap;
    const height = top + inner + gap;
    const between = columns === 2 ? names / (width - names) : 0;
    const changes = { height, "margin.t": top, "margin.b": gap };
    for (let place = 0; place < meta.panels; place++) {
      const number = place ? place + 1 : "";
      const [row, column] = [Math.floor(place / columns), place % columns];
      const upper = 1 - (row * (meta.panel + title + gap) + title) / inner;
      const share = (1 - between * (columns - 1)) / columns;
      changes[`xaxis${number}.domain`] = [column * (share + between), column * (share + between) + share];
      changes[`yaxis${number}.domain`] = [Math.max(0, upper - meta.panel / inner), upper];
    }
    return changes;
  };

  // A legend needs more lines on a narrow screen; the figure grows by them, so that the drawing keeps its height.
  const fit = ({ plot, content }, printing) => {
    const { meta } = content.layout;
    const width = printing ? PAPER_WIDTH : plot.clientWidth;
    if (meta.panels) return { width, ...arrange(meta, width) };
    const fitting = Math.max(1, Math.floor(width / (52 + 7.2 * meta.longest)));
    const lines = meta.legend > 1 ? Math.ceil(meta.legend / fitting) : 0;
    return { width, height: meta.height * (printing ? 0.85 : 1) + 20 * lines, "margin.t": 14 + 20 * lines };
  };

  const adapt = (figure, printing) => ({ ...theme(figure.content.layout, printing), ...fit(figure, printing) });

  // Changes are written as plotly's relayout takes them, such as { "font.color": "black" }.
  const assign = (layout, changes) => {
    for (const [path, value] of Object.entries(changes)) {
      const keys = path.split(".");
      const last = keys.pop();
      keys.reduce((tree, key) => (tree[key] ??= {}), layout)[last] = value;
    }
  };

  const draw = async (figure) => {
    const { plot, content, name } = figure;
    assign(content.layout, { ...adapt(figure, print.matches), dragmode: touch.matches ? false : "zoom" }); // else a finger could not scroll past
    await Plotly.newPlot(plot, content.data, content.layout, {
      displaylogo: false,
      displayModeBar: touch.matches ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
      toImageButtonOptions: { format: "svg", filename: name },
    });
    plot.dataset.drawn = "yes";
  };

  const redraw = (printing) => {
    for (const figure of figures) if (figure.plot.dataset.drawn) Plotly.relayout(figure.plot, adapt(figure, printing));
  };

  // Names were escaped for plotly; and a spreadsheet must not take a name for a formula.
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value !== "string") return String(value);
    const text = value.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
    return `"${(/^[=+\-@\t]/.test(text) ? "'" : "") + text.replaceAll('"', '""')}"`;
  };

  const tabulate = (traces) => {
    const told = traces.filter((trace) => trace.meta && trace.meta.columns);
    const { columns } = told[0].meta;
    const rows = told.flatMap(({ name, x, y, z, customdata }) =>
      z ? y.flatMap((up, row) => x.map((along, column) => [name, along, up, z[row][column]])) : x.map((along, place) => [name, along, y[place], customdata ? customdata[place] : null]));
    const kept = [0, 1, 2, 3].filter((place) => told.some((trace) => trace.meta.columns[place]));
    return [kept.map((place) => columns[place] || ""), ...rows.map((row) => kept.map((place) => cell(row[place])))].map((row) => row.join(",")).join("\r\n") + "\r\n";
  };

  const save = ({ name, content }) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(["\ufeff", tabulate(content.data)], { type: "text/csv;charset=utf-8" }));
    link.download = `${name}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  for (const figure of figures) figure.button.addEventListener("click", () => save(figure));
  dark.addEventListener("change", () => redraw(print.matches));
  print.addEventListener("change", () => redraw(print.matches));
  addEventListener("beforeprint", () => redraw(true));
  addEventListener("afterprint", () => redraw(false));
  let width = innerWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar comes and goes
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => redraw(print.matches), 100);
  });

  // One at a time with a pause between, so that the text can be read and scrolled from the first moment.
  (async () => {
    for (const figure of figures) {
      await new Promise((resume) => setTimeout(resume, 0));
      await draw(figure);
    }
    document.documentElement.dataset.drawn = "all";
  })();
})();
