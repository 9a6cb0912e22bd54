"use strict";
// Draws the figures whose data stand in this page, fits them to screen, theme and paper, follows what the reader chooses, and saves them, and their data as CSV.
(() => {
  const THEMES = {
    light: { ink: "#22252a", rule: "#dcdee2", card: "#ffffff" },
    dark: { ink: "#d5d8dc", rule: "#33373d", card: "#1d2024" },
  };
  const PAPER_WIDTH = 690; // CSS pixels between the margins of a printed page
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const print = matchMedia("print");
  const touch = matchMedia("(pointer: coarse)");
  const AHEAD = 600; // pixels below the screen in which figures are drawn before the reader comes to them
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

  // Megabytes of data are read when a figure is drawn, not when the page opens.
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

  // Panels of a map stand in two columns where there is room; lengths are in pixels until the last step.
  const arrange = (meta, width) => {
    const names = meta.gap + 30; // beside each panel
    const columns = meta.panels > 1 && width - 2 * names >= 440 ? 2 : 1;
    const rows = Math.ceil(meta.panels / columns);
    const [count, longest] = meta.labels ?? [0, 0]; // names below a panel; where they do not fit side by side, plotly turns them
    const turned = count * (7 * longest + 8) > width / columns - names;
    const [top, title, gap] = [meta.bars ? 10 : 44, (meta.panels > 1 ? 26 : 6) + (meta.bars ? 40 : 0), 52 + (turned ? Math.min(6 * longest, 160) : 0)];
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
      if (count) changes[`xaxis${number}.tickangle`] = turned ? 90 : 0;
      if (meta.bars) {
        changes[`coloraxis${number}.colorbar.x`] = column * (share + between);
        changes[`coloraxis${number}.colorbar.y`] = upper + title / inner;
        changes[`coloraxis${number}.colorbar.yanchor`] = "top";
      }
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

  const chosen = (figure) => {
    const { states } = read(figure);
    const mine = figure.method ? states.filter((state) => state.method === figure.method.value) : states;
    return mine[figure.frame ? Number(figure.frame.value) : 0];
  };

  // A state brings new data for the traces, and what it shows in words.
  const show = (figure) => {
    const { plot, content, frame, output } = figure;
    const state = chosen(figure);
    content.data.forEach((trace, place) => Object.assign(trace, state.data[place]));
    assign(content.layout, state.axes);
    plot.setAttribute("aria-label", state.alt);
    if (frame) {
      output.textContent = state.frame;
      frame.setAttribute("aria-valuetext", `${content.frame} ${state.frame}`);
    }
    if (plot.dataset.drawn) Plotly.react(plot, content.data, content.layout);
  };

  // The slider has a place for each frame of the method; after a change of method it stays at the nearest frame.
  const offer = (figure) => {
    const { states } = read(figure);
    const mine = states.filter((state) => !figure.method || state.method === figure.method.value);
    if (!figure.frame) return;
    const before = figure.output.textContent;
    const wanted = before === "" ? Infinity : Number(before);
    const distances = mine.map((state) => (wanted === Infinity ? -Number(state.frame) : Math.abs(Number(state.frame) - wanted)));
    figure.frame.max = String(mine.length - 1);
    figure.frame.value = String(distances.indexOf(Math.min(...distances)));
  };

  const prepare = (figure) => {
    if (!figure.method && !figure.frame) return;
    offer(figure);
    show(figure);
    figure.method?.addEventListener("change", () => { offer(figure); show(figure); });
    figure.frame?.addEventListener("input", () => show(figure));
  };

  const paint = (figure) => {
    const content = read(figure);
    const { plot, name } = figure;
    prepare(figure);
    assign(content.layout, { ...adapt(figure, print.matches), dragmode: touch.matches ? false : "zoom" }); // else a finger could not scroll past
    const painting = Plotly.newPlot(plot, content.data, content.layout, {
      displaylogo: false,
      displayModeBar: touch.matches ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
      toImageButtonOptions: { format: "svg", filename: name },
    });
    plot.dataset.drawn = "yes";
    return painting;
  };

  const draw = (figure) => (figure.painting ??= paint(figure));

  const redraw = (printing) => {
    for (const figure of figures) {
      if (printing) draw(figure);
      if (figure.plot.dataset.drawn) Plotly.relayout(figure.plot, adapt(figure, printing));
    }
  };

  // A spreadsheet must not take a name for a formula.
  const quote = (text) => `"${(/^[=+\-@\t]/.test(text) ? "'" : "") + text.replaceAll('"', '""')}"`;

  // Names were escaped for plotly.
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value !== "string") return String(value);
    return quote(value.replaceAll("<br>", " ").replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&"));
  };

  const tabulate = (traces) => {
    const told = traces.filter((trace) => trace.meta && trace.meta.columns);
    const rows = told.flatMap(({ name, x, y, z, customdata }) =>
      z ? y.flatMap((up, row) => x.map((along, column) => [name, along, up, z[row][column]])) : x.map((along, place) => [name, along, y[place], customdata ? customdata[place] : null]));
    const kept = [0, 1, 2, 3].filter((place) => told.some((trace) => trace.meta.columns[place]));
    return { heads: kept.map((place) => told[0].meta.columns[place] || ""), rows: rows.map((row) => kept.map((place) => cell(row[place]))) };
  };

  // A figure with states saves all of them, with whose and when in front.
  const write = (figure) => {
    const { data, states, frame } = read(figure);
    const whose = [figure.method ? "method" : "", states.some((state) => state.frame) ? frame : ""];
    const shown = states.length ? states : [{ method: "", frame: "", data: data.map(() => ({})) }];
    const tables = shown.map((state) => {
      const { heads, rows } = tabulate(data.map((trace, place) => ({ ...trace, ...state.data[place] })));
      const front = [quote(state.method), state.frame];
      const lead = (cells) => [...cells.filter((_, place) => whose[place] && states.length)];
      return { heads: [...lead(whose), ...heads], rows: rows.map((row) => [...lead(front), ...row]) };
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

  // A picture is saved on white, in the colors of paper, whatever the screen shows.
  const saveImage = async (figure, format) => {
    await draw(figure);
    await Plotly.relayout(figure.plot, { ...adapt(figure, true), paper_bgcolor: "white" });
    await Plotly.downloadImage(figure.plot, { format, filename: figure.name, scale: format === "png" ? 3 : 1, width: PAPER_WIDTH, height: figure.plot.layout.height });
    await Plotly.relayout(figure.plot, { ...adapt(figure, print.matches), paper_bgcolor: "rgba(0,0,0,0)" });
  };

  for (const figure of figures) figure.button?.addEventListener("click", () => save(figure));
  for (const figure of figures) figure.images.forEach((button) => button.addEventListener("click", () => saveImage(figure, button.value)));
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

  // What is on the screen comes first, then what a reader comes to next, the rest while nothing else is to be done; one at a time, so that the text can be
  // read and scrolled at once. The marks let a browser's tools, and our benchmark, see when.
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
      const waiting = figures.filter((figure) => !figure.painting);
      if (!waiting.some(within(0)) && !document.documentElement.dataset.drawn) report("seen");
      if (!waiting.length) break;
      await (waiting.some(within(AHEAD)) ? pause() : rest());
      await draw(waiting.find(within(0)) ?? waiting.find(within(AHEAD)) ?? waiting[0]);
    }
    await Promise.all(figures.map((figure) => figure.painting));
    report("all");
  })();
})();
