"use strict";
// Draws the figures from the data in this page, fits them to the screen, the color scheme and print, shows the state that the reader selects, and saves
// figures as images and their data as CSV.
(() => {
  const THEMES = {
    light: { ink: "#22252a", rule: "#dcdee2", card: "#ffffff" },
    dark: { ink: "#d5d8dc", rule: "#33373d", card: "#1d2024" },
  };
  const PAPER_WIDTH = 690; // CSS pixels between the margins of a printed page
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const print = matchMedia("print");
  const touch = matchMedia("(pointer: coarse)");
  const AHEAD = 600; // pixels below the screen in which figures are drawn in advance
  const figures = [...document.querySelectorAll("figure")].map((element) => ({
    name: element.id,
    plot: element.querySelector(".plot"),
    button: element.querySelector(".csv"),
    images: [...element.querySelectorAll(".image")],
    method: element.querySelector(".method"),
    frame: element.querySelector(".frame"),
    output: element.querySelector("output"),
    text: element.querySelector("script").textContent,
  }));

  // The data are parsed when a figure is drawn, not when the page opens.
  const read = (figure) => {
    if (!figure.content) [figure.content, figure.text] = [JSON.parse(figure.text), null];
    return figure.content;
  };

  const axes = (layout) => Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key));

  const theme = (layout, printing) => {
    const { ink, rule, card } = THEMES[dark.matches && !printing ? "dark" : "light"];
    const changes = { "font.color": ink, "hoverlabel.bgcolor": card, "hoverlabel.bordercolor": rule, "hoverlabel.font.color": ink };
    for (const axis of axes(layout)) {
      for (const line of ["gridcolor", "linecolor", "zerolinecolor"]) changes[`${axis}.${line}`] = rule;
    }
    return changes;
  };

  // Panels are in two columns where they fit; lengths are in pixels until the last step.
  const arrange = (meta, width) => {
    const names = meta.gap + 30; // beside each panel
    const columns = meta.panels > 1 && width - 2 * names >= 440 ? 2 : 1;
    const rows = Math.ceil(meta.panels / columns);
    const [count, longest] = meta.labels ?? [0, 0]; // names below a panel; where they do not fit side by side, they are rotated
    const rotated = count * (7 * longest + 8) > width / columns - names;
    const [top, title, gap] = [meta.bars ? 10 : 44, (meta.panels > 1 ? 26 : 6) + (meta.bars ? 40 : 0), 52 + (rotated ? Math.min(6 * longest, 160) : 0)];
    const inner = rows * (meta.panel + title + gap) - gap;
    const height = top + inner + gap;
    const between = columns === 2 ? names / (width - names) : 0;
    const changes = { height, "margin.t": top, "margin.b": gap };
    for (let index = 0; index < meta.panels; index++) {
      const number = index ? index + 1 : "";
      const [row, column] = [Math.floor(index / columns), index % columns];
      const upper = 1 - (row * (meta.panel + title + gap) + title) / inner;
      const share = (1 - between * (columns - 1)) / columns;
      changes[`xaxis${number}.domain`] = [column * (share + between), column * (share + between) + share];
      changes[`yaxis${number}.domain`] = [Math.max(0, upper - meta.panel / inner), upper];
      if (count) changes[`xaxis${number}.tickangle`] = rotated ? 90 : 0;
      if (meta.bars) {
        changes[`coloraxis${number}.colorbar.x`] = column * (share + between);
        changes[`coloraxis${number}.colorbar.y`] = upper + title / inner;
        changes[`coloraxis${number}.colorbar.yanchor`] = "top";
      }
    }
    return changes;
  };

  // A legend needs more lines on a narrow screen; the figure grows by them, so that the plot keeps its height.
  const fit = ({ plot, content }, printing) => {
    const { meta } = content.layout;
    const width = printing ? PAPER_WIDTH : plot.clientWidth;
    if (meta.panels) return { width, ...arrange(meta, width) };
    const fitting = Math.max(1, Math.floor(width / (52 + 7.2 * meta.longest)));
    const lines = meta.legend > 1 ? Math.ceil(meta.legend / fitting) : 0;
    return { width, height: meta.height * (printing ? 0.85 : 1) + 20 * lines, "margin.t": 14 + 20 * lines + (meta.top ?? 0) };
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

  const selectedState = (figure) => {
    const { states } = read(figure);
    const ofMethod = figure.method ? states.filter((state) => state.method === figure.method.value) : states;
    return ofMethod[figure.frame ? Number(figure.frame.value) : 0];
  };

  // A state has new data for the traces and a new description.
  const show = (figure) => {
    const { plot, content, frame, output } = figure;
    const state = selectedState(figure);
    content.data.forEach((trace, index) => Object.assign(trace, state.data[index]));
    assign(content.layout, state.axes);
    plot.setAttribute("aria-label", state.alt);
    if (frame) {
      output.textContent = state.frame;
      frame.setAttribute("aria-valuetext", `${content.frame} ${state.frame}`);
    }
    if (plot.dataset.drawn) Plotly.react(plot, content.data, content.layout);
  };

  // The slider has a step for each frame of the method; after a change of method it goes to the nearest frame.
  const setSlider = (figure) => {
    const { states } = read(figure);
    const ofMethod = states.filter((state) => !figure.method || state.method === figure.method.value);
    if (!figure.frame) return;
    const before = figure.output.textContent;
    const wanted = before === "" ? Infinity : Number(before);
    const distances = ofMethod.map((state) => (wanted === Infinity ? -Number(state.frame) : Math.abs(Number(state.frame) - wanted)));
    figure.frame.max = String(ofMethod.length - 1);
    figure.frame.value = String(distances.indexOf(Math.min(...distances)));
  };

  const connectControls = (figure) => {
    if (!figure.method && !figure.frame) return;
    setSlider(figure);
    show(figure);
    figure.method?.addEventListener("change", () => { setSlider(figure); show(figure); });
    figure.frame?.addEventListener("input", () => show(figure));
  };

  const newPlot = (figure) => {
    const content = read(figure);
    const { plot, name } = figure;
    connectControls(figure);
    assign(content.layout, { ...adapt(figure, print.matches), dragmode: touch.matches ? false : "zoom" }); // otherwise touch could not scroll past the figure
    const drawing = Plotly.newPlot(plot, content.data, content.layout, {
      displaylogo: false,
      displayModeBar: touch.matches ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
      toImageButtonOptions: { format: "svg", filename: name },
    });
    plot.dataset.drawn = "yes";
    return drawing;
  };

  const draw = (figure) => (figure.drawing ??= newPlot(figure));

  const adaptAll = (printing) => {
    for (const figure of figures) {
      if (printing) draw(figure);
      if (figure.plot.dataset.drawn) Plotly.relayout(figure.plot, adapt(figure, printing));
    }
  };

  // A name that a spreadsheet would read as a formula gets an apostrophe.
  const quote = (text) => `"${(/^[=+\-@\t]/.test(text) ? "'" : "") + text.replaceAll('"', '""')}"`;

  // Names are escaped for plotly.
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value !== "string") return String(value);
    return quote(value.replaceAll("<br>", " ").replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&"));
  };

  const tabulate = (traces) => {
    const named = traces.filter((trace) => trace.meta && trace.meta.columns);
    const rows = named.flatMap(({ name, x, y, z, customdata }) =>
      z ? y.flatMap((up, row) => x.map((along, column) => [name, along, up, z[row][column]])) : x.map((along, index) => [name, along, y[index], customdata ? customdata[index] : null]));
    const kept = [0, 1, 2, 3].filter((index) => named.some((trace) => trace.meta.columns[index]));
    return { heads: kept.map((index) => named[0].meta.columns[index] || ""), rows: rows.map((row) => kept.map((index) => cell(row[index]))) };
  };

  // A figure with states saves all of them, with the columns method and frame in front.
  const write = (figure) => {
    const { data, states, frame } = read(figure);
    const names = [figure.method ? "method" : "", states.some((state) => state.frame) ? frame : ""];
    const shown = states.length ? states : [{ method: "", frame: "", data: data.map(() => ({})) }];
    const tables = shown.map((state) => {
      const { heads, rows } = tabulate(data.map((trace, index) => ({ ...trace, ...state.data[index] })));
      const front = [quote(state.method), state.frame];
      const lead = (cells) => [...cells.filter((_, index) => names[index] && states.length)];
      return { heads: [...lead(names), ...heads], rows: rows.map((row) => [...lead(front), ...row]) };
    });
    return [tables[0].heads, ...tables.flatMap(({ rows }) => rows)].map((row) => row.join(",") + "\r\n").join("");
  };

  const save = (figure) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(["\ufeff", write(figure)], { type: "text/csv;charset=utf-8" }));
    link.download = `${figure.name}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  // An image is saved on white in the light color scheme.
  const saveImage = async (figure, format) => {
    await draw(figure);
    await Plotly.relayout(figure.plot, { ...adapt(figure, true), paper_bgcolor: "white" });
    await Plotly.downloadImage(figure.plot, { format, filename: figure.name, scale: format === "png" ? 3 : 1, width: PAPER_WIDTH, height: figure.plot.layout.height });
    await Plotly.relayout(figure.plot, { ...adapt(figure, print.matches), paper_bgcolor: "rgba(0,0,0,0)" });
  };

  for (const figure of figures) figure.button?.addEventListener("click", () => save(figure));
  for (const figure of figures) figure.images.forEach((button) => button.addEventListener("click", () => saveImage(figure, button.value)));
  dark.addEventListener("change", () => adaptAll(print.matches));
  print.addEventListener("change", () => adaptAll(print.matches));
  addEventListener("beforeprint", () => adaptAll(true));
  addEventListener("afterprint", () => adaptAll(false));
  let width = innerWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone shows and hides its address bar
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => adaptAll(print.matches), 100);
  });

  // Figures on the screen are drawn first, then those just below it, and the rest when the browser is idle; one at a time, so that the page scrolls
  // meanwhile. The marks are for developer tools and benchmarks/report_opening.py.
  const rest = () => new Promise((resume) => (window.requestIdleCallback ?? setTimeout)(resume, { timeout: 200 }));
  const pause = () => new Promise((resume) => setTimeout(resume, 0));
  const within = (ahead) => ({ plot }) => {
    const { top, bottom } = plot.getBoundingClientRect();
    return top < innerHeight + ahead && bottom > -ahead;
  };
  const report = (state) => {
    performance.mark(`figures-${state}`);
    document.documentElement.dataset.drawn = state;
  };
  (async () => {
    for (;;) {
      const waiting = figures.filter((figure) => !figure.drawing);
      if (!waiting.some(within(0)) && !document.documentElement.dataset.drawn) report("seen");
      if (!waiting.length) break;
      await (waiting.some(within(AHEAD)) ? pause() : rest());
      await draw(waiting.find(within(0)) ?? waiting.find(within(AHEAD)) ?? waiting[0]);
    }
    await Promise.all(figures.map((figure) => figure.drawing));
    report("all");
  })();
})();
