// The page of one run or of several: headline, charts, tables and the rollouts.
//
// The data lie in the page (#data, a file that was written by `whet report`) or, where that is empty, are asked from the
// server that sent the page, again and again while a run goes on. Text that models or users wrote reaches the document
// as text nodes only, with control characters spelled out; there is no innerHTML and no eval in this file.
"use strict";
(() => {
  const POLL_MS = 2000; // between questions to the server while a run goes on
  const LIMIT = 50; // rollouts in one answer
  const SHOWN = 20000; // characters of a text before it is cut, with a button for the rest
  const BINS = 120; // points of a stacked chart: single steps would be a thicket
  const GRID = 200; // points of a median over seeds
  const CARDS = 24; // rollouts side by side before a button shows the rest
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 2], [1, 4], [12, 6], [4, 4]];
  const MARKS = { right: "✓", wrong: "✗", unjudged: "?" };
  const TIMES = ["generate", "judge", "log_probs", "train", "sync", "draft", "save", "eval", "idle"];
  const FLOW = [
    // what became of a group; every group has one of these ends
    ["trained", "trained", 2],
    ["stale", "cut or too old", 3],
    ["too_easy", "too easy", 4],
    ["too_hard", "too hard", 1],
    ["probed", "probed only", 5],
  ];
  const TRAINING = [
    // metric, title, what it says, format, whether the axis begins at zero
    ["reward/mean", "Reward", "mean of the step", "number", false],
    [
      "curriculum/signal_share",
      "Groups with signal",
      "share of judged groups with right and wrong answers",
      "share",
      true,
    ],
    ["learn/entropy", "Entropy", "nats per token; near zero the model no longer explores", "number", true],
    ["length/p50", "Response length", "tokens of the median response", "count", true],
    ["length/truncated", "Cut off at the limit", "share of responses", "share", true],
    ["learn/grad_norm", "Gradient norm", "before clipping; spikes are a warning", "number", true],
    ["learn/kl", "KL to the reference", "how far the policy has moved", "number", true],
    ["learn/mismatch", "Mismatch", "between log-probs of engine and learner; it should stay near zero", "number", true],
  ];
  const LENGTHS = [
    ["length/p50", "median"],
    ["length/p90", "90%"],
    ["length/p99", "99%"],
    ["length/max", "longest"],
  ];

  const state = {
    book: null,
    page: null,
    served: false,
    axis: "step",
    smooth: true,
    run: 0,
    step: null,
    charts: [],
    sliders: [],
    sections: [],
  };

  // ---- the document

  /** An element with attributes, listeners (onclick: f) and children; strings become text nodes. */
  function el(name, attributes, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value === true ? "" : String(value));
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
    return node;
  }

  const HIDDEN = new RegExp(
    "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u200b\\u200e\\u200f\\u2028-\\u202e" +
      "\\u2060-\\u2069\\ufeff\\ufff9-\\ufffb]|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]",
    "g",
  );

  /** Text with what cannot be seen spelled out: control characters, marks of direction, halves of a character. */
  function visible(text) {
    const spell = (c) => "⟨U+" + c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟩";
    return String(text ?? "").replace(HIDDEN, spell);
  }

  const excerpt = (text, most) => (
    (text = visible(String(text ?? "").slice(0, most + 1))),
    text.length > most ? text.slice(0, most) + "…" : text
  );

  // ---- numbers as words

  const known = (value) => typeof value === "number" && Number.isFinite(value);
  const MISSING = "–";

  function number(value) {
    if (!known(value)) return MISSING;
    const size = Math.abs(value);
    if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(1).replace("e+", "e");
    return String(Number(value.toPrecision(3)));
  }

  function count(value) {
    if (!known(value)) return MISSING;
    for (const [unit, name] of [
      [1e12, "T"],
      [1e9, "G"],
      [1e6, "M"],
      [1e3, "k"],
    ]) {
      if (Math.abs(value) >= unit) return String(Number((value / unit).toPrecision(3))) + name;
    }
    return String(Number(value.toPrecision(3)));
  }

  function duration(value) {
    if (!known(value)) return MISSING;
    if (value < 1) return value === 0 ? "0\u00a0s" : Math.round(value * 1000) + "\u00a0ms";
    if (value < 120) return String(Number(value.toPrecision(3))) + "\u00a0s";
    if (value < 7200) return Number((value / 60).toPrecision(3)) + "\u00a0min";
    return Number((value / 3600).toPrecision(3)) + "\u00a0h";
  }

  const share = (value) =>
    known(value) ? (Math.abs(value) < 0.001 ? number(100 * value) : Number((100 * value).toFixed(1))) + "%" : MISSING;
  const FORMATS = { number, count, duration, share };
  const AXES = {
    step: ["steps", "step", count],
    tokens_generated: ["tokens", "tokens generated", count],
    time_s: ["time", "time of training", duration],
  };

  // ---- series

  const column = (run, key) => run.series[key] || [];
  const has = (run, key) => column(run, key).some(known);
  const last = (values) => values[values.length - 1];

  /** Points of a metric on the chosen axis: x rises, gaps are null; a metric of few rows (evaluations) has no gaps. */
  function points(run, key, axis = state.axis) {
    const xs = column(run, axis),
      ys = column(run, key),
      sparse = ys.filter(known).length * 2 < ys.length;
    const out = [[], []];
    for (let i = 0; i < ys.length; i++) {
      const x = xs[i],
        y = known(ys[i]) ? ys[i] : null;
      if (!known(x) || (y === null && (sparse || !out[0].length)) || (out[0].length && x < last(out[0]))) continue;
      if (out[0].length && x === last(out[0])) {
        if (y !== null) out[1][out[1].length - 1] = y;
        continue;
      }
      out[0].push(x);
      out[1].push(y);
    }
    return out;
  }

  /** Where a step lies on the chosen axis. */
  function place(run, step) {
    const steps = column(run, "step"),
      xs = column(run, state.axis);
    let low = 0,
      high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1;
      else high = middle;
    }
    return known(xs[low]) ? xs[low] : null;
  }

  /** A moving mean over a fifteenth of the points: single steps are noisy. */
  function moving([xs, ys]) {
    const half = Math.floor(ys.length / 30),
      out = [];
    for (let i = 0; i < ys.length; i++) {
      const near = ys.slice(Math.max(0, i - half), i + half + 1).filter(known);
      out.push(ys[i] === null || !near.length ? null : near.reduce((a, b) => a + b, 0) / near.length);
    }
    return [xs, out];
  }

  function between([xs, ys], x) {
    let high = xs.findIndex((value) => value >= x);
    if (high < 0) return null;
    if (xs[high] === x || high === 0) return ys[high];
    const part = (x - xs[high - 1]) / (xs[high] - xs[high - 1]);
    return ys[high - 1] + part * (ys[high] - ys[high - 1]);
  }

  /** Median, smallest and largest of several curves, where all of them have values. */
  function middle(curves) {
    curves = curves
      .map(([xs, ys]) => [xs.filter((_, i) => ys[i] !== null), ys.filter((y) => y !== null)])
      .filter(([xs]) => xs.length);
    if (!curves.length) return { xs: [], ys: [], low: [], high: [] };
    const from = Math.max(...curves.map(([xs]) => xs[0])),
      to = Math.min(...curves.map(([xs]) => last(xs)));
    let xs = [...new Set(curves.flatMap(([each]) => each))].filter((x) => x >= from && x <= to).sort((a, b) => a - b);
    if (xs.length > GRID) xs = Array.from({ length: GRID }, (_, i) => from + ((to - from) * i) / (GRID - 1));
    const values = xs.map((x) =>
      curves
        .map((curve) => between(curve, x))
        .filter(known)
        .sort((a, b) => a - b),
    );
    const half = (v) => (v.length % 2 ? v[(v.length - 1) / 2] : (v[v.length / 2 - 1] + v[v.length / 2]) / 2);
    return { xs, ys: values.map(half), low: values.map((v) => v[0]), high: values.map(last) };
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const hue = (i) => colour("--c" + (i % 8));

  /** Colours of ordered things such as levels, from dark blue to yellow: cividis, which also the colour-blind can order. */
  function ordered(i, n) {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const stops = dark
      ? [
          [92, 140, 220],
          [150, 150, 160],
          [255, 226, 90],
        ]
      : [
          [0, 34, 110],
          [110, 112, 118],
          [196, 160, 0],
        ];
    const at = n > 1 ? (2 * i) / (n - 1) : 0,
      low = Math.min(1, Math.floor(at));
    return (
      "#" +
      stops[low]
        .map((v, k) =>
          Math.round(v + (at - low) * (stops[low + 1][k] - v))
            .toString(16)
            .padStart(2, "0"),
        )
        .join("")
    );
  }

  /** The lines of one metric: one of a single run, or one an arm, whose seeds become a median and a band. */
  function linesOf(key, { smooth = false, low = null, high = null } = {}) {
    const page = state.page,
      even = (curve) => (smooth && state.smooth ? moving(curve) : curve);
    return page.arms
      .map((arm, i) => {
        const runs = arm.runs.map((r) => page.runs[r]).filter((run) => has(run, key));
        if (!runs.length) return null;
        const line = { label: arm.name, colour: hue(i), dash: DASHES[i % DASHES.length] };
        if (runs.length > 1) return { ...line, ...middle(runs.map((run) => even(points(run, key)))) };
        const [xs, raw] = points(runs[0], key),
          ys = even([xs, raw])[1];
        const faint = ys !== raw && page.runs.length === 1 ? raw : null;
        const band = low && has(runs[0], low) ? { low: points(runs[0], low)[1], high: points(runs[0], high)[1] } : {};
        return { ...line, xs, ys, faint, ...(band.low && band.low.length === xs.length ? band : {}) };
      })
      .filter((line) => line && line.xs.length);
  }

  /** Means over neighbouring rows, so that a stacked chart has at most BINS points. */
  function binned(xs, columns) {
    const size = Math.ceil(xs.length / BINS) || 1,
      out = columns.map(() => []),
      places = [];
    for (let i = 0; i < xs.length; i += size) {
      places.push(xs[Math.min(i + size, xs.length) - 1]);
      columns.forEach((values, k) => {
        const near = values.slice(i, i + size).filter(known);
        out[k].push(near.length ? near.reduce((a, b) => a + b, 0) / near.length : 0);
      });
    }
    return [places, out];
  }

  // ---- charts

  const watcher = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const chart = entry.target.chart;
        chart.seen = entry.isIntersecting;
        if (chart.seen && chart.dirty) draw(chart);
      }
    },
    { rootMargin: "300px" },
  );
  const sizes = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const { plot } = entry.target.chart,
        width = Math.floor(entry.contentRect.width);
      if (plot && width > 0 && width !== plot.width) plot.setSize({ width, height: plot.height });
    }
  });

  /** Adds a chart that is drawn when it comes into view. spec: title, says, has() and model(), see `draw`. */
  function addChart(parent, spec) {
    const chart = { ...spec, off: new Set(), seen: false, dirty: true, plot: null, signature: "" };
    chart.readout = el("output", { "aria-live": "off" });
    chart.heading = el("h3", {}, typeof spec.title === "string" ? spec.title : "");
    chart.note = el("span", { class: "says" }, spec.says || "");
    chart.box = el("div", { class: "plot", role: "img", tabindex: 0, "data-chart": spec.id });
    chart.legend = el("ul", { class: "legend" });
    chart.figure = el(
      "figure",
      { class: spec.wide ? "wide" : null },
      el("figcaption", {}, chart.heading, chart.note, chart.readout),
      chart.box,
      chart.legend,
    );
    chart.box.chart = chart;
    chart.box.addEventListener("keydown", (event) => walk(chart, event));
    chart.box.addEventListener("blur", () => {
      if (chart.plot) chart.plot.setCursor({ left: -10, top: -10 });
    });
    parent.append(chart.figure);
    watcher.observe(chart.box);
    sizes.observe(chart.box);
    state.charts.push(chart);
    return chart;
  }

  /** Arrow keys move the cursor of a chart from point to point. */
  function walk(chart, event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity, Escape: null };
    if (!chart.plot || !(event.key in moves)) return;
    event.preventDefault();
    if (moves[event.key] === null) {
      chart.at = null;
      chart.plot.setCursor({ left: -10, top: -10 });
      return;
    }
    const xs = chart.plot.data[0],
      from = chart.at ?? (moves[event.key] > 0 ? -1 : xs.length);
    chart.at = Math.min(xs.length - 1, Math.max(0, from + moves[event.key]));
    chart.plot.setCursor({ left: chart.plot.valToPos(xs[chart.at], "x"), top: 1 });
    chart.readout.setAttribute("aria-live", "polite");
  }

  /** Draws what model() gives: { lines: [{label, colour, dash, xs, ys, low, high, faint, dots}], x: [label, format], y:
   *  format, kind: "lines" | "stack" | "bars" | "steps", zero, top, names (of bars or of values), summary }. */
  function draw(chart) {
    chart.dirty = false;
    const model = chart.model();
    chart.figure.hidden = !model || !model.lines.length;
    if (chart.figure.hidden) return;
    chart.shown = model;
    const lines = model.lines.filter((line) => !chart.off.has(line.label));
    const width = Math.floor(chart.box.clientWidth),
      height = chart.wide ? 288 : 240;
    const { data, series, bands } = columns(model, lines, width);
    const look = JSON.stringify([
      model.lines.map((l) => l.label),
      lines.map((l) => [l.label, l.colour, !!l.low, !!l.faint]),
      model.kind,
      model.x[0],
      model.names,
      model.top,
    ]);
    if (chart.plot && chart.signature === look) chart.plot.setData(data);
    else {
      if (chart.plot) chart.plot.destroy();
      chart.box.replaceChildren();
      chart.plot = new uPlot(options(chart, model, series, bands, width, height), data, chart.box);
      chart.box.append(el("p", { class: "axis" }, model.x[0]));
    }
    if (chart.signature !== look) {
      chart.at = null;
      drawLegend(chart, model);
    }
    chart.signature = look;
    model.lines.forEach((line, i) => {
      line.output = chart.outputs[i];
    });
    readOut(chart, chart.plot);
    chart.box.setAttribute(
      "aria-label",
      `${chart.heading.textContent}. ${model.summary || summary(model)} Arrow keys read single points.`,
    );
  }

  /** The lines as aligned columns of uPlot, with the series and bands that belong to them. */
  function columns(model, lines, width) {
    const series = [{}],
      bands = [],
      tables = [];
    const thin = { points: { show: false }, width: 0 };
    if (model.kind === "stack") {
      let sum = lines.length ? lines[0].ys.map(() => 0) : [];
      const tops = lines.map((line) => (sum = sum.map((v, i) => v + (line.ys[i] || 0))));
      for (let i = lines.length - 1; i >= 0; i--) {
        // the highest first, the lower ones over it
        series.push({ stroke: colour("--card"), width: 1, fill: lines[i].colour, points: { show: false } });
      }
      return { data: [model.lines[0].xs, ...tops.reverse()], series, bands };
    }
    for (const line of lines) {
      const table = [line.xs];
      if (line.low) {
        bands.push({ series: [series.length + 1, series.length], fill: line.colour + "2b" });
        table.push(line.low, line.high);
        series.push({ ...thin }, { ...thin });
      }
      if (line.faint) {
        table.push(line.faint);
        series.push({ points: { show: false }, width: 1, stroke: line.colour + "55" });
      }
      table.push(line.ys);
      const few = line.xs.length * 14 < width;
      const style = {
        stroke: line.colour,
        width: 2.25,
        dash: line.dash,
        points: { show: line.dots ? few : line.xs.length === 1, size: 6, fill: line.colour },
      };
      if (model.kind === "bars")
        Object.assign(style, {
          paths: uPlot.paths.bars({ size: [0.8, 70] }),
          fill: line.colour,
          width: 0,
          dash: [],
          points: { show: false },
        });
      if (model.kind === "steps") Object.assign(style, { paths: uPlot.paths.stepped({ align: 1 }) });
      series.push(style);
      tables.push(table);
    }
    const data = tables.length
      ? uPlot.join(
          tables,
          tables.map((table) => table.map(() => 1)),
        )
      : [[]];
    return { data, series, bands };
  }

  function options(chart, model, series, bands, width, height) {
    const ink = colour("--soft"),
      grid = { stroke: colour("--grid"), width: 1 },
      font = "12px system-ui, sans-serif";
    const axis = { stroke: ink, font, grid, ticks: { show: false } };
    const xFormat = model.names && model.kind === "bars" ? (x) => model.names[x] ?? "" : model.x[1];
    const yFormat = model.names && model.kind === "steps" ? (y) => model.names[y] ?? "" : model.y;
    const yRange = (_, low, high) => {
      if (model.names && model.kind === "steps") return [-0.5, model.names.length - 0.5];
      if (low === null || high === null) return [0, 1];
      if (model.top !== undefined && high <= model.top && low >= 0)
        return [0, Math.min(model.top, high > 0.55 * model.top ? model.top : high * 1.25 || 0.1 * model.top)];
      if (model.zero || model.kind === "stack" || model.kind === "bars")
        return [Math.min(0, low), high > 0 ? high * 1.06 : 1];
      return uPlot.rangeNum(low, high, 0.1, true);
    };
    const xRange = (_, low, high) =>
      low === null
        ? [0, 1]
        : model.kind === "bars"
          ? [low - 0.6, high + 0.6]
          : low === high
            ? [low - 0.5, high + 0.5]
            : [low, high];
    const whole = [1, 2, 5].flatMap((k) => [...Array(13).keys()].map((p) => k * 10 ** p)).sort((a, b) => a - b);
    return {
      width,
      height,
      series,
      bands,
      padding: [12, 14, 0, 0],
      legend: { show: false },
      scales: { x: { time: false, range: xRange }, y: { range: yRange } },
      axes: [
        {
          ...axis,
          grid: { show: false },
          size: 24,
          values: (_, splits) => splits.map(xFormat),
          space: model.kind === "bars" ? 34 : 60,
          incrs: model.x[1] === duration ? undefined : whole,
        },
        {
          ...axis,
          size: (_, values) => 14 + 7 * Math.max(3, ...(values || []).map((v) => String(v ?? "").length)),
          values: (_, splits) => splits.map(yFormat),
          ...(model.kind === "steps" && model.names ? { splits: () => model.names.map((__, i) => i) } : { space: 42 }),
        },
      ],
      cursor: {
        y: false,
        drag: { x: false, y: false },
        points: { show: model.kind === "lines", size: 8 },
        ...((model.kind === "lines" && model.shared) || model.kind === "stack"
          ? { sync: { key: "x", setSeries: false } }
          : {}),
      },
      hooks: { setCursor: [(plot) => readOut(chart, plot)], drawClear: [(plot) => drawStages(plot, model)] },
    };
  }

  /** Stages of the curriculum as quiet bands behind the lines. */
  function drawStages(plot, model) {
    const run = state.page.runs[state.run];
    if (!model.shared || state.page.runs.length > 1 || run.stages.length < 2) return;
    const { ctx, bbox } = plot,
      ratio = devicePixelRatio;
    ctx.save();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textBaseline = "top";
    ctx.textAlign = "left";
    run.stages.forEach((stage, i) => {
      const next = run.stages[i + 1];
      const from = Math.max(bbox.left, plot.valToPos(place(run, stage.step) ?? 0, "x", true));
      const to = next
        ? Math.min(bbox.left + bbox.width, plot.valToPos(place(run, next.step), "x", true))
        : bbox.left + bbox.width;
      if (to <= from) return;
      if (i % 2) {
        ctx.fillStyle = colour("--c7") + "1c";
        ctx.fillRect(from, bbox.top, to - from, bbox.height);
      }
      const words = excerpt(stage.label || `stage ${stage.stage}`, 24);
      ctx.fillStyle = colour("--soft");
      if (ctx.measureText(words).width < to - from - 8 * ratio)
        ctx.fillText(words, from + 4 * ratio, bbox.top + 5 * ratio);
    });
    ctx.restore();
  }

  /** Values at the cursor, or the last ones, beside the names of the lines. */
  function readOut(chart, plot) {
    const model = chart.shown,
      at = plot.cursor.idx,
      inside = at !== null && at !== undefined && plot.cursor.left >= 0;
    const words = model.kind === "bars" ? model.names?.[plot.data[0][at]] : model.x[1](plot.data[0][at]);
    const values = [];
    for (const line of model.lines) {
      const k = inside ? line.xs.findLastIndex((x) => x <= plot.data[0][at]) : line.ys.findLastIndex(known);
      const value =
        k >= 0 && (model.kind !== "bars" || inside)
          ? model.names && model.kind === "steps"
            ? model.names[line.ys[k]]
            : model.y(line.ys[k])
          : "";
      const spread =
        value && line.low && known(line.low[k]) ? ` (${model.y(line.low[k])} to ${model.y(line.high[k])})` : "";
      if (line.output) line.output.textContent = value + spread;
      values.push(value + spread);
    }
    const unit = model.kind === "bars" ? model.x[0] + " " : model.x[0] === "step" ? "step " : "";
    chart.readout.textContent = inside
      ? `${unit}${words}${model.lines.length === 1 ? ": " + values[0] : ""}`
      : model.lines.length === 1 && values[0]
        ? `now ${values[0]}`
        : "";
  }

  function svg(name, attributes, ...children) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  /** A square for areas, a piece of the line for lines. */
  function swatch(line, kind) {
    const area = kind === "stack" || kind === "bars";
    const square = { width: 12, height: 12, rx: 2, fill: line.colour };
    const stroke = { stroke: line.colour, "stroke-width": 3, "stroke-dasharray": (line.dash || []).join(" ") };
    const shape = area ? svg("rect", square) : svg("line", { x1: 0, x2: 26, y1: 6, y2: 6, ...stroke });
    return svg("svg", { width: area ? 12 : 26, height: 12, "aria-hidden": "true" }, shape);
  }

  function drawLegend(chart, model) {
    chart.outputs = [];
    chart.legend.hidden = model.lines.length < 2;
    const entries = model.lines.map((line) => {
      const output = el("output", { "aria-live": "off" });
      chart.outputs.push(output);
      const onclick = () => {
        chart.off.has(line.label) ? chart.off.delete(line.label) : chart.off.add(line.label);
        draw(chart);
        focusLine(chart, line.label);
      };
      const pressed = String(!chart.off.has(line.label));
      const about = { type: "button", "aria-pressed": pressed, "data-line": line.label, onclick };
      return el("li", {}, el("button", about, swatch(line, model.kind), visible(line.label), output));
    });
    chart.legend.replaceChildren(...entries);
  }

  function focusLine(chart, label) {
    [...chart.legend.querySelectorAll("button")].find((button) => button.dataset.line === label)?.focus();
  }

  /** The chart in words, for those who do not see it. */
  function summary(model) {
    return model.lines
      .slice(0, 8)
      .map((line) => {
        const values = line.ys.filter(known);
        if (!values.length) return `${visible(line.label)} has no values.`;
        if (model.kind === "bars")
          return `${visible(line.label)}: most at ${model.names[line.xs[line.ys.indexOf(Math.max(...values))]]}.`;
        const say = (v) => (model.names ? model.names[v] : model.y(v));
        return `${visible(line.label)}: from ${say(values[0])} to ${say(last(values))}.`;
      })
      .join(" ");
  }

  // ---- sections

  /** A section with a grid of charts. It hides itself while none of its parts has data. */
  function addSection(id, title, note, fill) {
    const grid = el("div", { class: "grid" });
    const heading = title ? el("h2", {}, title) : null;
    const about = note ? el("p", { class: "note" }, note) : null;
    const node = el("section", { id, "aria-label": title || "Accuracy" }, heading, about, grid);
    const section = { id, title, node, grid, parts: [] };
    document.getElementById("main").append(node);
    state.sections.push(section);
    fill(section);
    return section;
  }

  function addPart(section, spec) {
    section.parts.push(addChart(spec.parent || section.grid, spec));
  }

  const current = () => state.page.runs[state.run];
  const single = () => state.page.runs.length === 1;
  const xAxis = () => [AXES[state.axis][1], AXES[state.axis][2]];
  const forRun = () => (single() ? "" : ` of ${visible(current().name)}`);
  const byStep = (lines, y, rest = {}) => ({ lines, x: xAxis(), y, kind: "lines", shared: true, ...rest });

  function levelsOf(run, name) {
    const prefix = `eval/${name}/level/`;
    const found = Object.keys(run.series)
      .filter((key) => key.startsWith(prefix))
      .map((key) => [key, key.slice(prefix.length).replace(/\/accuracy$/, "")]);
    return found.sort((a, b) => a[1].localeCompare(b[1], undefined, { numeric: true }));
  }

  function evaluationLines(names) {
    const run = current(),
      greedy = run.greedy || (run.headline.greedy ? [run.headline.evaluation] : []);
    return names
      .flatMap((name) =>
        linesOf(`eval/${name}/accuracy`, { low: `eval/${name}/accuracy_low`, high: `eval/${name}/accuracy_high` }).map(
          (line) => ({
            ...line,
            dots: true,
            ...(single() ? { label: `${name}${greedy.includes(name) ? ", greedy" : ", drawn"}` } : {}),
          }),
        ),
      )
      .map((line, i) => (single() ? { ...line, colour: hue(i), dash: DASHES[i % DASHES.length] } : line));
  }

  function accuracySection(section) {
    const names = [...new Set(state.page.runs.flatMap((run) => run.evaluations))];
    const spread = state.page.arms.some((arm) => arm.runs.length > 1)
      ? "median of the seeds; the band holds them all"
      : "share of right answers; the band is the 95% interval";
    const draws = (id, title, sets) =>
      addPart(section, {
        id,
        title,
        says: spread,
        wide: true,
        has: () => sets.some((name) => state.page.runs.some((run) => has(run, `eval/${name}/accuracy`))),
        model: () => byStep(evaluationLines(sets), share, { top: 1, zero: true }),
      });
    const costs = el("dl", { class: "facts" }),
      advice = el("p", { class: "note" }),
      below = el("div", { class: "wide" }, costs, advice);
    const showBelow = () => {
      costs.replaceChildren(...facts());
      advice.textContent = visible(firstSentence(current().headline.verdict)[1]);
    };
    if (single()) {
      draws("accuracy", "Accuracy", names);
      section.grid.append(below);
      section.parts.push({ figure: below, has: () => true, update: showBelow });
    } else names.forEach((name) => draws(`accuracy-${name}`, `Accuracy on ${visible(name)}`, [name]));
    names.forEach((name) =>
      addPart(section, {
        id: `levels-${name}`,
        says: "share of right answers, by the level of the prompt",
        wide: true,
        title: () => `Accuracy by level${names.length > 1 ? ", " + visible(name) : ""}${forRun()}`,
        has: () => levelsOf(current(), name).length > 0,
        model: () => {
          const levels = levelsOf(current(), name);
          const lines = levels.map(([key, level], i) => {
            const [xs, ys] = points(current(), key);
            return {
              label: `level ${level}`,
              xs,
              ys,
              colour: ordered(i, levels.length),
              dash: DASHES[i % 4],
              dots: true,
            };
          });
          return byStep(
            lines.filter((line) => line.xs.length),
            share,
            { top: 1, zero: true },
          );
        },
      }),
    );
  }

  function trainingSection(section) {
    for (const [key, title, says, format, zero] of TRAINING) {
      if (key === "length/p50" && single()) {
        lengthChart(section);
        continue;
      }
      addPart(section, {
        id: key,
        title,
        says,
        has: () => state.page.runs.some((run) => has(run, key)),
        model: () =>
          byStep(linesOf(key, { smooth: true }), FORMATS[format], { zero, ...(format === "share" ? { top: 1 } : {}) }),
      });
    }
    anyMetric(section);
  }

  function lengthChart(section) {
    addPart(section, {
      id: "length",
      title: "Response length",
      says: "tokens; share of responses that are shorter",
      has: () => has(current(), "length/p50"),
      model: () =>
        byStep(
          LENGTHS.filter(([key]) => has(current(), key)).map(([key, label], i) => {
            const [xs, ys] = state.smooth ? moving(points(current(), key)) : points(current(), key);
            return { label, xs, ys, colour: hue(i), dash: DASHES[i] };
          }),
          count,
          { zero: true },
        ),
    });
  }

  /** Any other metric of the log, chosen by its name. */
  function anyMetric(section) {
    const menu = el("select", { id: "any-metric", onchange: () => update() });
    const label = el("label", { for: "any-metric", class: "seen" }, "Metric to draw");
    const shownBefore = new Set([
      ...TRAINING.map(([key]) => key),
      ...LENGTHS.map(([key]) => key),
      "step",
      "time_s",
      "tokens_generated",
    ]);
    const fill = () => {
      const names = [...new Set(state.page.runs.flatMap((run) => Object.keys(run.series)))]
        .filter((key) => !shownBefore.has(key) && !key.startsWith("eval/"))
        .sort();
      if (names.length !== menu.options.length) {
        const kept = menu.value;
        menu.replaceChildren(...names.map((name) => el("option", {}, visible(name))));
        [...menu.options].forEach((option, i) => {
          option.value = names[i];
        });
        menu.value = names.includes(kept) ? kept : names.includes("learn/loss") ? "learn/loss" : names[0];
      }
      return names.length > 0;
    };
    addPart(section, {
      id: "any",
      title: "Any other metric",
      has: fill,
      model: () => {
        fill();
        return byStep(linesOf(menu.value, { smooth: true }), number);
      },
    });
    const chart = last(section.parts);
    chart.note.replaceWith(label, menu);
  }

  // ---- where the rollouts went

  /** Counts of groups a step by what became of them. */
  function flowOf(run) {
    const rows = run.pictures.filter((picture) => picture.flow);
    return { steps: rows.map((row) => row.step), get: (name) => rows.map((row) => row.flow[name] ?? null) };
  }

  const total = (values) => values.filter(known).reduce((a, b) => a + b, 0);

  function flowSection(section) {
    const funnel = el("ul", { class: "bars" });
    const card = el(
      "div",
      { class: "card wide" },
      el("h3", {}, "From question to gradient"),
      el("p", { class: "note" }, "Groups of the whole run: how far they came."),
      funnel,
    );
    section.grid.append(card);
    section.parts.push({
      figure: card,
      has: () => total(flowOf(current()).get("asked")) > 0,
      update: () => drawFunnel(funnel),
    });
    addPart(section, {
      id: "flow",
      wide: true,
      title: () => `What became of the groups${forRun()}`,
      says: "groups a step",
      has: () => FLOW.some(([name]) => total(flowOf(current()).get(name)) > 0),
      model: () => {
        const flow = flowOf(current()),
          kinds = FLOW.filter(([name]) => total(flow.get(name)) > 0);
        const [xs, sums] = binned(
          flow.steps.map((step) => place(current(), step)),
          kinds.map(([name]) => flow.get(name)),
        );
        return byStep(
          kinds.map(([, label, c], i) => ({ label, colour: hue(c), xs, ys: sums[i] })),
          count,
          { kind: "stack" },
        );
      },
    });
    stepSlider(section, (picture) => picture.pass_rates || picture.posterior || picture.scores);
    const tenths = Array.from({ length: 11 }, (_, i) => `${10 * i}%`);
    bars(
      section,
      "pass_rates",
      "Pass rates of the groups",
      "groups judged in the step; those at 0% and 100% teach nothing",
      (p) => p.pass_rates,
      (rates) => ({
        names: tenths,
        x: "pass rate",
        lines: [
          ["no signal", "--rest", rates.map((n, i) => (i % 10 ? 0 : n))],
          ["signal", "--c0", rates.map((n, i) => (i % 10 ? n : 0))],
        ],
      }),
    );
    const twenty = (low, high) => Array.from({ length: 20 }, (_, i) => number(low + ((high - low) * i) / 20));
    bars(
      section,
      "posterior",
      "CurES: what prompts are believed to be",
      "prompts by the mean of their posterior",
      (p) => p.posterior,
      (p) => ({
        names: twenty(0, 1),
        x: "believed pass rate from",
        lines: [["prompts", "--c0", p.counts]],
      }),
    );
    bars(
      section,
      "allocation",
      "CurES: where rollouts are spent",
      "mean rollouts a prompt, by believed pass rate",
      (p) => p.posterior && p.posterior.rollouts.some(known) && p.posterior,
      (p) => ({
        names: twenty(0, 1),
        x: "believed pass rate from",
        lines: [["rollouts a prompt", "--c2", p.rollouts]],
      }),
    );
    bars(
      section,
      "scores",
      "ScalingRL: scores and active set",
      "prompts by score",
      (p) => p.scores,
      (p) => ({
        names: twenty(p.low, p.high),
        x: "score from",
        lines: [
          ["all prompts", "--rest", p.counts],
          ["in the active set", "--c1", p.active],
        ],
      }),
    );
  }

  function drawFunnel(list) {
    const flow = flowOf(current());
    const spare = flow.get("spare").findLast(known);
    const rows = [
      ["asked", "asked", 7],
      ["screened", "screened", 5],
      ["continued", "continued after screening", 0],
      ["trained", "trained", 2],
      ["too_easy", "dropped: too easy", 4],
      ["too_hard", "dropped: too hard", 1],
      ["stale", "dropped: cut or too old", 3],
    ]
      .map(([name, label, c]) => [label, c, total(flow.get(name))])
      .filter(([, , n]) => n > 0);
    const most = Math.max(...rows.map(([, , n]) => n)),
      asked = rows[0][2];
    list.replaceChildren(
      ...rows.map(([label, c, n]) => barRow(label, [[n / most, hue(c)]], `${count(n)} groups, ${share(n / asked)}`)),
    );
    if (spare > 0)
      list.append(
        barRow("waiting at the end", [[spare / most, hue(6)]], `${count(spare)} groups, kept for a later update`),
      );
  }

  /** One bar of several pieces: [[length from 0 to 1, colour]]. */
  function barRow(name, pieces, words) {
    const track = el(
      "span",
      { class: "track", "aria-hidden": "true" },
      pieces.map(([length, fill]) => {
        const piece = el("span");
        piece.style.width = `${100 * length}%`;
        piece.style.background = fill;
        return piece;
      }),
    );
    return el("li", {}, el("span", { class: "name" }, visible(name)), track, el("span", { class: "says" }, words));
  }

  /** The picture that the sliders point at, among those that have something. */
  function pictureAt(test) {
    const found = current().pictures.filter(test);
    if (!found.length) return null;
    return found.findLast((picture) => state.step === null || picture.step <= state.step) || found[0];
  }

  /** Bars of one step, chosen by the slider. */
  function bars(section, id, title, says, pick, shape, y = count) {
    addPart(section, {
      id,
      title,
      says,
      has: () => current().pictures.some((picture) => pick(picture)),
      model: () => {
        const picture = pictureAt((each) => pick(each));
        if (!picture) return null;
        const { names, x, lines } = shape(pick(picture)),
          xs = names.map((_, i) => i);
        return {
          kind: "bars",
          names,
          x: [x, count],
          y,
          zero: true,
          lines: lines.map(([label, c, ys]) => ({ label, colour: colour(c), xs, ys })),
          step: picture.step,
        };
      },
    });
  }

  /** A slider over the steps that have pictures; all sliders of the page show the same step, the newest at first. */
  function stepSlider(section, test) {
    const id = `slider-${section.id}`,
      output = el("output", { for: id });
    const input = el("input", { type: "range", id, min: 0, step: 1, oninput: () => pick() });
    const found = () => current().pictures.filter(test);
    const pick = () => {
      const pictures = found(),
        at = Number(input.value);
      state.step = at >= pictures.length - 1 ? null : pictures[at].step;
      state.sliders.forEach((slider) => slider.show());
      state.charts
        .filter((chart) => chart.shown && chart.shown.step !== undefined)
        .forEach((chart) => {
          chart.dirty = true;
          if (chart.seen) draw(chart);
        });
    };
    const show = () => {
      const pictures = found(),
        picture = pictureAt(test);
      label.textContent = `Pictures of one step${forRun()}`;
      input.max = Math.max(0, pictures.length - 1);
      input.value = picture ? pictures.indexOf(picture) : 0;
      const words = picture ? `step ${picture.step}${state.step === null ? ", the newest" : ""}` : "";
      output.textContent = words;
      input.setAttribute("aria-valuetext", words);
    };
    const label = el("label", { for: id }),
      node = el("div", { class: "steps wide" }, label, input, output);
    section.grid.append(node);
    section.parts.push({ figure: node, has: () => found().length > 1, update: show });
    state.sliders.push({ show });
  }

  // ---- where the time went

  function timeNames(run) {
    const found = Object.keys(run.series)
      .filter(
        (key) =>
          key.startsWith("time/") &&
          !["time/total", "time/gpu_idle", "time/warm_start"].includes(key) &&
          total(column(run, key)) > 0,
      )
      .map((key) => key.slice(5));
    return [...TIMES.filter((name) => found.includes(name)), ...found.filter((name) => !TIMES.includes(name)).sort()];
  }

  const timeHue = (name) =>
    hue(TIMES.includes(name) ? [0, 4, 6, 1, 5, 3, 7, 2, 7][TIMES.indexOf(name)] : 3) + (name === "idle" ? "70" : "");

  function timeSection(section) {
    const list = el("ul", { class: "bars long" }),
      key = el("ul", { class: "legend" });
    const card = el(
      "div",
      { class: "card wide" },
      el("h3", {}, single() ? "All steps together" : "All steps of each arm, mean of its seeds"),
      key,
      list,
    );
    section.grid.append(card);
    section.parts.push({
      figure: card,
      has: () => state.page.runs.some((run) => timeNames(run).length),
      update: () => {
        const names = [...new Set(state.page.runs.flatMap(timeNames))];
        const sums = state.page.arms.map((arm) =>
          names.map((name) => [
            name,
            total(arm.runs.map((r) => total(column(state.page.runs[r], `time/${name}`)))) / arm.runs.length,
          ]),
        );
        const warm = state.page.arms.map(
          (arm) => total(arm.runs.map((r) => total(column(state.page.runs[r], "time/warm_start")))) / arm.runs.length,
        );
        const wholes = sums.map((parts) => total(parts.map(([, n]) => n))),
          most = Math.max(...wholes) || 1;
        list.replaceChildren(
          ...sums.map((parts, i) => {
            const words = [...parts]
              .sort((a, b) => b[1] - a[1])
              .filter(([, n]) => n >= 0.005 * wholes[i])
              .map(([name, n]) => `${name.replace("_", "-")} ${share(Number((n / wholes[i]).toFixed(2)))}`)
              .join(", ");
            return barRow(
              single() ? duration(wholes[i]) : state.page.arms[i].name,
              parts.map(([name, n]) => [n / most, timeHue(name)]),
              (single() ? words : `${duration(wholes[i])}: ${words}`) +
                (warm[i] ? `; before them ${duration(warm[i])} of warm start` : ""),
            );
          }),
        );
        key.replaceChildren(
          ...names.map((name) => {
            const dot = el("span", { class: "dot" });
            dot.style.background = timeHue(name);
            return el("li", {}, dot, name.replace("_", "-"));
          }),
        );
      },
    });
    addPart(section, {
      id: "time",
      wide: true,
      title: () => `Seconds of a step${forRun()}`,
      says: "evaluations and saving stand out as peaks",
      has: () => timeNames(current()).length > 0,
      model: () => {
        const run = current(),
          names = timeNames(run),
          steps = column(run, "step")
            .map((step, i) => [step, i])
            .filter(([step]) => step > 0);
        const [xs, sums] = binned(
          steps.map(([step]) => place(run, step)),
          names.map((name) => steps.map(([, i]) => column(run, `time/${name}`)[i])),
        );
        return byStep(
          names.map((name, i) => ({ label: name.replace("_", "-"), colour: timeHue(name), xs, ys: sums[i] })),
          duration,
          { kind: "stack" },
        );
      },
    });
    metricCharts(section, [
      ["time/gpu_idle", "Idle GPU", "share of the step in which nothing was queued", share, { top: 1 }],
      ["rollout/tokens_per_s", "Tokens per second", "of the engine, while it generates", count],
    ]);
    stepSlider(section, (picture) => picture.running);
    runningCharts(section);
  }

  // A chart over the steps for each metric that a run has: its name, title, sentence, format and options.
  function metricCharts(section, rows) {
    for (const [metric, title, says, format, options] of rows) {
      addPart(section, {
        id: metric,
        title,
        says,
        has: () => state.page.runs.some((run) => has(run, metric)),
        model: () => byStep(linesOf(metric, { smooth: true }), format, { zero: true, ...options }),
      });
    }
  }

  // ---- speculation

  const drafts = () =>
    state.page.runs.some((run) => has(run, "draft/saved") || has(run, "draft/accept_length")) ||
    current().pictures.some((picture) => picture.accepts);
  const armsOf = (run) => [...new Set(run.pictures.map((picture) => picture.arm).filter(Boolean))];

  function speculationSection(section) {
    metricCharts(section, [
      ["draft/saved_share", "Tokens from drafts", "share that came without a forward pass of its own", share],
      ["draft/accept_length", "Accepted length", "tokens per verification, with the model's own", number],
    ]);
    addPart(section, {
      id: "arm",
      title: () => `Shape in use${forRun()}`,
      says: "the one used most in each step",
      wide: true,
      has: () => drafts() && armsOf(current()).length > 0,
      model: () => {
        const names = armsOf(current()).map(visible),
          rows = current().pictures.filter((picture) => picture.arm);
        const line = {
          label: "shape",
          colour: hue(0),
          xs: rows.map((row) => place(current(), row.step)),
          ys: rows.map((row) => names.indexOf(visible(row.arm))),
        };
        return byStep([line], (v) => names[v] ?? "", { kind: "steps", names });
      },
    });
    const shares = (run) =>
      Object.keys(run.series).filter((key) => key.startsWith("draft/share_") && total(column(run, key)) > 0);
    addPart(section, {
      id: "draft-shares",
      title: () => `Time of each shape${forRun()}`,
      says: "share of the engine's time",
      wide: true,
      has: () => drafts() && shares(current()).length > 0,
      model: () => {
        const run = current(),
          keys = shares(run),
          rows = column(run, "step")
            .map((_, i) => i)
            .filter((i) => keys.some((key) => known(column(run, key)[i])));
        const [xs, parts] = binned(
          rows.map((i) => column(run, state.axis)[i]),
          keys.map((key) => rows.map((i) => column(run, key)[i])),
        );
        return byStep(
          keys.map((key, i) => ({ label: key.slice(12), colour: hue(i), xs, ys: parts[i] })),
          share,
          { top: 1, kind: "stack" },
        );
      },
    });
    stepSlider(section, (picture) => picture.accepts);
    const rate = (a, b) => (b ? a / b : 0);
    bars(
      section,
      "accept-position",
      "Accepted by position",
      "share of drafted tokens that were accepted, by their place in the draft",
      (p) => p.accepts?.position?.length && p.accepts.position,
      (rows) => ({
        names: rows.map((_, i) => String(i + 1)),
        x: "position",
        lines: [["accepted", "--c2", rows.map(([offered, taken]) => rate(taken, offered))]],
      }),
      share,
    );
    bars(
      section,
      "accept-rows",
      "Accepted by batch",
      "accepted tokens a draft, by the rows that ran",
      (p) => p.accepts?.rows?.length && p.accepts.rows,
      (rows) => ({
        names: rows.map(([from]) => `${from}+`),
        x: "running rows",
        lines: [["accepted tokens a draft", "--c3", rows.map(([, drafted, taken]) => rate(taken, drafted))]],
      }),
      number,
    );
  }

  /** How many rows ran. */
  function runningCharts(section) {
    const shown = (p) => p.running && p.running.length > 1;
    addPart(section, {
      id: "running",
      title: "Running rows within the step",
      says: "a long tail means that few long responses hold up the step",
      wide: true,
      has: () => current().pictures.some(shown),
      model: () => {
        const picture = pictureAt(shown);
        if (!picture) return null;
        const [xs, ys] = [0, 1].map((k) => picture.running.map((point) => point[k]));
        const lines = [{ label: "running rows", colour: hue(0), xs, ys }];
        return { lines, kind: "steps", x: ["seconds of the step", duration], y: count, zero: true, step: picture.step };
      },
    });
    metricCharts(section, [
      ["rollout/batch_mean", "Running rows, mean of the step", "drafts pay where few rows run", count],
    ]);
  }

  // ---- tables

  /** heads and rows of cells (strings or nodes); the first cell of a row names it. */
  function table(heads, rows, caption, stack = true) {
    const cell = (value, i) =>
      el(i ? "td" : "th", i ? { "data-head": heads[i], class: "text" } : { scope: "row", class: "text" }, value);
    return el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": caption || heads.filter(Boolean).join(", ") },
      el(
        "table",
        { class: stack ? "stack" : null },
        caption ? el("caption", {}, caption) : null,
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            heads.map((head) => (head ? el("th", { scope: "col" }, head) : el("td"))),
          ),
        ),
        el(
          "tbody",
          {},
          rows.map((row) => el("tr", {}, row.map(cell))),
        ),
      ),
    );
  }

  /** A cell of a comparison: its value, and below it range and ratio. Only what is sure has a colour. */
  function compareCell(cell) {
    if (!cell || typeof cell !== "object") return visible(cell);
    const small = (words) => (words ? el("small", {}, visible(words)) : null);
    const verdict = cell.better > 0 ? "right" : cell.better < 0 ? "wrong" : null;
    const ratio = cell.ratio ? el("small", { class: verdict }, visible(cell.ratio)) : null;
    return [visible(cell.value), small(cell.range), ratio, small(cell.ratio_range)];
  }

  /** Tables and method prose, folded: what the first sentence and the chart rest on. */
  function compareSection(section) {
    const runs = el("div"),
      tables = el("div", { class: "tables" }),
      notes = el("div");
    const title = single() ? "Tables and notes" : "Tables, notes and single runs";
    const holder = el("details", { class: "wide" }, el("summary", {}, title), runs, tables, notes);
    section.grid.append(holder);
    section.parts.push({
      figure: holder,
      has: () => true,
      update: () => {
        const page = state.page,
          prose = page === state.book ? [] : paragraphs(state.book.note).slice(1);
        const found = page.compare || { tables: [], verdicts: [], notes: [] };
        const said = [...found.verdicts.slice(1), found.notes.join(" ")].flatMap(paragraphs);
        const shown = found.tables.map((each) =>
          table(["", ...each.heads.map(visible)], each.rows.map((row) => row.map(compareCell)), visible(each.title)),
        );
        runs.replaceChildren(single() ? "" : runsTable());
        tables.replaceChildren(...shown);
        notes.replaceChildren(...prose, ...paragraphs(page.note), ...said);
      },
    });
  }

  function settingsSection(section) {
    const holder = el("div", { class: "wide" });
    section.grid.append(holder);
    section.parts.push({
      figure: holder,
      has: () => current().settings.length > 0,
      update: () => {
        const open = holder.querySelector("details")?.open;
        const details = el(
          "details",
          {},
          el("summary", {}, `${current().settings.length} settings${forRun()} that differ from the defaults`),
          table(
            ["setting", "value"],
            current().settings.map((row) => row.map(visible)),
            "",
            false,
          ),
        );
        details.open = !!open;
        holder.replaceChildren(details);
      },
    });
  }

  // ---- the headline

  function interval(head) {
    return known(head.low) && known(head.high) ? `${share(head.low)} to ${share(head.high)}` : "";
  }

  function stateChip(run) {
    const kind = run.state === "going on" ? "state live" : run.state === "finished" ? "state done" : "state";
    return el("span", { class: kind }, visible(run.state));
  }

  const paragraphs = (words) =>
    String(words || "")
      .split("\n\n")
      .filter((each) => each.trim())
      .map((each) => el("p", { class: "note" }, visible(each)));

  /** One of several things to choose: a row of radio buttons. */
  function choices(name, legend, entries, chosen, onpick) {
    const button = ([value, words]) =>
      el(
        "label",
        {},
        el("input", { type: "radio", name, value, checked: value === chosen, onchange: () => onpick(value) }),
        words,
      );
    const set = el("span", { class: "set" }, entries.map(button));
    return el("fieldset", { class: `switch ${name}` }, el("legend", {}, legend), set);
  }

  function chapterSwitch() {
    const titles = state.book.chapters.map((chapter, i) => [i, visible(chapter.title)]);
    return choices("chapter", "Chapter", titles, state.book.chapters.indexOf(state.page), (i) => {
      Object.assign(state, { page: state.book.chapters[i], run: 0, step: null });
      build();
      document.querySelector("[name=chapter]:checked")?.focus();
    });
  }

  /** The first screen: what this is, and one sentence that says what came of it. The chart follows. */
  function headline() {
    const page = state.page,
      [run] = page.runs;
    const parts = [el("h1", {}, visible(state.book.title))];
    let words = run ? "" : "There is no run to show yet.";
    if (page !== state.book) {
      words = String(state.book.note || "").split("\n\n")[0];
      parts.push(chapterSwitch());
    } else if (single()) {
      words = run.headline.verdict;
      parts.push(stateChip(run));
    } else if (run) {
      words = page.compare?.verdicts[0] || `${page.runs.length} runs.`;
    }
    const [first] = single() ? firstSentence(words) : [words];
    parts.push(el("p", { class: "verdict", id: "verdict" }, visible(first)));
    if (single() && run.note) parts.push(el("p", { class: "message" }, visible(run.note)));
    document.getElementById("top").replaceChildren(...parts);
  }

  /** A text cut behind its first sentence: a point, a space and a capital. */
  function firstSentence(words) {
    const at = String(words).search(/\.\s+(?=[A-Z0-9])/);
    return at < 0 ? [words, ""] : [words.slice(0, at + 1), words.slice(at + 1).trim()];
  }

  /** What a single run cost, below its first chart. */
  function facts() {
    const head = current().headline;
    const rows = [
      ["tokens generated", count(head.tokens)],
      ["time of training", duration(head.seconds)],
      ["steps", count(head.steps)],
      ["hardware", visible(head.hardware || "")],
      ["recipe", visible(head.recipe || "")],
    ];
    const shown = rows.filter(([, value]) => value && value !== MISSING);
    return shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  }

  function runsTable() {
    const armOf = (i) => state.page.arms.findIndex((arm) => arm.runs.includes(i));
    return table(
      ["run", "accuracy", "tokens", "time", "steps", "state"],
      state.page.runs.map((run, i) => {
        const head = run.headline,
          dot = el("span", { class: "dot", "aria-hidden": "true" });
        dot.style.background = hue(Math.max(0, armOf(i)));
        const words = [head.verdict, run.note].filter(Boolean).map((text) => el("small", {}, visible(text)));
        return [
          [dot, visible(run.name), ...words],
          [share(head.accuracy), el("small", {}, interval(head))],
          count(head.tokens),
          duration(head.seconds),
          count(head.steps),
          stateChip(run),
        ];
      }),
      "Runs",
    );
  }

  // ---- the bar of controls

  function controls() {
    const bar = document.getElementById("bar");
    const axes = Object.keys(AXES).filter((key) => state.page.runs.some((run) => has(run, key)));
    const pick = (key) => {
      state.axis = key;
      update();
    };
    const onchange = (event) => {
      state.smooth = event.target.checked;
      update();
    };
    const smooth = el("input", { type: "checkbox", id: "smooth", checked: true, onchange });
    const names = axes.map((key) => [key, AXES[key][0]]);
    const parts = [
      choices("axis", "Against", names, state.axis, pick),
      el("label", { class: "tick" }, smooth, "smooth"),
    ];
    if (!single()) {
      const menu = el(
        "select",
        {
          id: "run",
          onchange: () => {
            state.run = Number(menu.value);
            state.step = null;
            update();
            browser.reset();
          },
        },
        state.page.runs.map((run, i) => el("option", { value: i }, excerpt(run.name, 60))),
      );
      parts.push(el("label", { class: "tick" }, "details of", menu));
    }
    const links = el("nav", { "aria-label": "Sections", id: "links" });
    bar.replaceChildren(el("div", {}, ...parts, links));
    bar.hidden = false;
  }

  function drawLinks() {
    const links = document.getElementById("links"),
      shown = state.sections.filter((section) => !section.node.hidden);
    if (links && links.children.length !== shown.length)
      links.replaceChildren(
        ...shown.map((section) => el("a", { href: "#" + section.id }, section.short || section.title)),
      );
  }

  // ---- rollouts

  const browser = {
    rows: [],
    next: null,
    chosen: null,
    mode: "one",
    paint: "log_probs",
    wait: 0,
    turn: 0,
    phases: new Set(),
    levels: new Set(),
  };

  /** Rollouts that match: asked from the server, or picked from those in the page. Resolves to {rows, next, searched}. */
  async function find(wanted, after = null, limit = LIMIT) {
    const { each, ...others } = wanted,
      narrow = ["q", "prompt", "group", "low", "high"].some((name) => others[name]);
    wanted = others; // who looks for certain rollouts wants all of them
    if (each && !narrow) wanted = { ...others, each };
    const filled = Object.entries(wanted).filter(([, value]) => value !== "" && value !== null && value !== undefined);
    if (state.served) {
      const query = new URLSearchParams([
        ["run", state.run],
        ...filled,
        ...(after === null ? [] : [["after", after]]),
        ["limit", limit],
      ]);
      const answer = await ask("rollouts?" + query);
      return { ...answer, rows: answer.rows.filter((row) => fits(row, wanted)) };
    }
    const fitting = newestFirst(current().rollouts).filter((row) => fits(row, wanted)),
      all = wanted.each ? oneOfEach(fitting) : fitting,
      from = after ?? 0,
      next = from + limit < all.length ? from + limit : null;
    return { rows: all.slice(from, from + limit), next, searched: fitting.length };
  }

  /** One rollout of each prompt in each step, a wrong one if there is one, as the server chooses. */
  function oneOfEach(rows) {
    const chosen = new Map(),
      order = ["wrong", "unjudged", "right"];
    for (const verdict of order)
      for (const row of rows) {
        const prompt = JSON.stringify([row.step, row.kind, row.prompt_id]);
        if (row.verdict === verdict && !chosen.has(prompt)) chosen.set(prompt, row);
      }
    const kept = new Set(chosen.values());
    return rows.filter((row) => kept.has(row));
  }

  /** The rows of the page, the newest step first, as the server gives them. */
  function newestFirst(rollouts) {
    rollouts.sorted = rollouts.sorted || [...(rollouts.rows || [])].sort((a, b) => b.step - a.step);
    return rollouts.sorted;
  }

  function fits(row, { step, kind, prompt, group, verdict, phase, level, q, low, high }) {
    const same = (wanted, value) =>
      wanted === undefined || wanted === null || wanted === "" || String(wanted) === String(value ?? "");
    if (
      !same(step, row.step) ||
      !same(kind, row.kind) ||
      !same(group, row.group_id) ||
      !same(verdict, row.verdict) ||
      !same(phase, row.phase) ||
      !same(level, row.level)
    )
      return false;
    if (prompt && !String(row.prompt_id).includes(prompt)) return false;
    if (low !== undefined && low !== "" && !(row.reward >= Number(low))) return false;
    if (high !== undefined && high !== "" && !(row.reward <= Number(high))) return false;
    return (
      !q ||
      [row.prompt, row.response, row.answer, row.prompt_id].some((text) =>
        String(text ?? "")
          .toLowerCase()
          .includes(q.toLowerCase()),
      )
    );
  }

  function rolloutSection(section) {
    const field = (label, node, extra) => el("label", { class: extra }, label, node);
    const menu = (name, first) => el("select", { name, onchange: () => search() }, el("option", { value: "" }, first));
    const later = () => {
      clearTimeout(browser.wait);
      browser.wait = setTimeout(search, 250);
    };
    const input = (name, type, holder) =>
      el("input", { name, type, placeholder: holder, oninput: later, step: type === "number" ? "any" : null });
    const each = el("input", { name: "each", type: "checkbox", value: "1", checked: true, onchange: () => search() });
    browser.step = menu("step", "all steps");
    browser.kind = menu("kind", "training and evaluation");
    browser.kind.append(el("option", { value: "step" }, "training"), el("option", { value: "eval" }, "evaluation"));
    browser.verdict = menu("verdict", "any verdict");
    browser.verdict.append(
      ...Object.keys(MARKS).map((name) => el("option", { value: name }, `${MARKS[name]} ${name}`)),
    );
    browser.phase = menu("phase", "any phase");
    browser.level = menu("level", "any level");
    const stepper = el(
      "span",
      { class: "stepper" },
      el("button", { type: "button", class: "plain", "aria-label": "Step before", onclick: () => turnStep(-1) }, "◀"),
      browser.step,
      el("button", { type: "button", class: "plain", "aria-label": "Next step", onclick: () => turnStep(1) }, "▶"),
    );
    browser.form = el(
      "form",
      {
        class: "filters",
        role: "search",
        "aria-label": "Filter rollouts",
        onsubmit: (event) => {
          event.preventDefault();
          search();
        },
      },
      field("Search in prompts and responses", input("q", "search", "any words"), "grow"),
      field("Step", stepper),
      field("Verdict", browser.verdict),
      field("Reward from", input("low", "number", "any")),
      field("to", input("high", "number", "any")),
      field("Phase", browser.phase),
      field("Level", browser.level),
      field("Kind", browser.kind),
      field("Prompt", input("prompt", "text", "its name")),
      el("label", { class: "tick" }, each, "one of each prompt"),
      el("button", { type: "reset", class: "plain", onclick: () => setTimeout(search) }, "Clear"),
    );
    browser.count = el("p", { class: "note", role: "status", id: "found" });
    browser.list = el("div", {
      class: "list",
      role: "group",
      "aria-label": "Rollouts; arrow keys up and down walk through them, left and right change the step",
      onkeydown: walkList,
    });
    browser.detail = el("div", { class: "detail" });
    const holder = el(
      "div",
      { class: "wide" },
      browser.form,
      browser.count,
      el("div", { class: "browser" }, browser.list, browser.detail),
    );
    const nothing = el(
      "p",
      { class: "note wide" },
      "This run has saved no rollouts (save.rollouts = 0, or its first step is not over).",
    );
    section.grid.append(holder, nothing);
    section.parts.push({ figure: holder, has: () => hasRollouts(), update: () => fillMenus() });
    section.parts.push({ figure: nothing, has: () => !hasRollouts(), update: () => {} });
    browser.reset = () => {
      browser.form.reset();
      browser.phases.clear();
      browser.levels.clear();
      fillMenus();
      search();
    };
    const first = new IntersectionObserver(
      (entries) => {
        if (entries.some((entry) => entry.isIntersecting)) {
          first.disconnect();
          search();
        }
      },
      { rootMargin: "400px" },
    );
    first.observe(holder);
  }

  const hasRollouts = () => !!current().rollouts && current().rollouts.total > 0;

  function refill(menu, values, word) {
    const kept = menu.value,
      [first, ...others] = menu.options;
    if (JSON.stringify(others.map((option) => option.value)) === JSON.stringify(values.map(String))) return;
    menu.replaceChildren(first, ...values.map((value) => el("option", { value }, word(value))));
    menu.value = values.map(String).includes(kept) ? kept : "";
  }

  function fillMenus() {
    const rollouts = current().rollouts;
    refill(browser.step, rollouts.steps, (step) => `step ${step}`);
    for (const row of [...(rollouts.rows || []), ...browser.rows]) {
      if (row.phase) browser.phases.add(row.phase);
      if (row.level !== null && row.level !== undefined && row.level !== "") browser.levels.add(String(row.level));
    }
    current().pictures.forEach((picture) =>
      Object.keys(picture.levels || {}).forEach((each) => browser.levels.add(each)),
    );
    const numeric = (a, b) => a.localeCompare(b, undefined, { numeric: true });
    refill(browser.phase, [...browser.phases].sort(numeric), (each) => excerpt(each, 40));
    refill(browser.level, [...browser.levels].sort(numeric), (each) => excerpt(each, 40));
    browser.level.parentElement.hidden = !browser.levels.size;
    browser.phase.parentElement.hidden = browser.phases.size < 2;
  }

  function turnStep(by) {
    const menu = browser.step,
      at = Math.min(
        menu.options.length - 1,
        Math.max(0, (menu.selectedIndex || (by < 0 ? menu.options.length : 0)) + by),
      );
    menu.selectedIndex = at;
    search();
  }

  const wantedNow = () => Object.fromEntries(new FormData(browser.form));

  async function search() {
    const turn = ++browser.turn;
    try {
      const answer = await findSome(wantedNow(), null, turn);
      if (!answer) return; // a newer question was asked meanwhile
      Object.assign(browser, { rows: answer.rows, next: answer.next });
      fillMenus();
      const kept = browser.chosen && browser.rows.find((row) => sameRow(row, browser.chosen));
      showList();
      choose(kept || browser.rows[0] || null);
    } catch (error) {
      if (turn === browser.turn) browser.count.textContent = String(error.message);
    }
  }

  const sameRow = (a, b) =>
    a.step === b.step &&
    a.kind === b.kind &&
    a.group_id === b.group_id &&
    a.index === b.index &&
    a.prompt_id === b.prompt_id;

  /** Asks on until an answer holds rows: the server reads only so much at once. */
  async function findSome(wanted, after, turn) {
    for (let looked = 0; ;) {
      const answer = await find(wanted, after);
      if (turn !== browser.turn) return null;
      if (answer.rows.length || !goesOn(answer.next)) return answer;
      looked += answer.searched || 0;
      browser.count.textContent = `Searching; ${count(looked)} rollouts looked at.`;
      after = answer.next;
    }
  }

  const goesOn = (next) => next !== null && next !== undefined;

  /** All rollouts that match, for a group or for one prompt over the run; at most 400. */
  async function findAll(wanted) {
    const rows = [];
    for (let after = null; ;) {
      const answer = await find(wanted, after, 100);
      rows.push(...answer.rows);
      if (!goesOn(answer.next) || rows.length >= 400) return rows;
      after = answer.next;
    }
  }

  async function more() {
    const turn = browser.turn,
      at = browser.rows.length;
    let answer;
    try {
      answer = await findSome(wantedNow(), browser.next, turn);
    } catch (error) {
      if (turn === browser.turn) browser.count.textContent = String(error.message);
    }
    if (!answer) return;
    browser.rows = browser.rows.concat(answer.rows);
    browser.next = answer.next;
    fillMenus();
    showList();
    browser.list.querySelectorAll("button.row")[at]?.focus();
  }

  function showList() {
    const { rows, next } = browser,
      whole = current().rollouts;
    const amount = `${rows.length}${goesOn(next) ? " or more" : ""} ${rows.length === 1 ? "rollout matches" : "rollouts match"}`;
    const rest = state.served
      ? ""
      : whole.rows && whole.rows.length < whole.total
        ? ` The page holds ${count(whole.rows.length)} of ${count(whole.total)}; whet report --serve shows them all.`
        : "";
    browser.count.textContent = rows.length ? `${amount}.${rest}` : `No rollout matches.${rest}`;
    browser.list.replaceChildren(
      ...rows.map((row) =>
        el(
          "button",
          { type: "button", class: "row", onclick: () => choose(row) },
          mark(row.verdict),
          el("span", { class: "excerpt", dir: "auto" }, excerpt(row.prompt, 80) || "(no prompt)"),
          el("span", {}, known(row.reward) ? number(row.reward) : ""),
          el(
            "span",
            { class: "meta" },
            `step ${row.step} · ${[
              row.kind === "eval" ? "evaluation" : row.phase,
              row.level !== null && row.level !== undefined && row.level !== "" ? `level ${row.level}` : "",
              `${count(row.length)} tokens`,
              row.finish === "length" ? "cut off" : "",
            ]
              .filter(Boolean)
              .map((word) => excerpt(word, 40))
              .join(" · ")}`,
          ),
        ),
      ),
      ...(!goesOn(next)
        ? []
        : [el("p", { class: "more" }, el("button", { type: "button", class: "plain", onclick: more }, "More"))]),
    );
    browser.list.hidden = !rows.length;
  }

  const mark = (verdict) =>
    el(
      "span",
      {
        class: `mark ${MARKS[verdict] ? verdict : "unjudged"}`,
        role: "img",
        "aria-label": MARKS[verdict] ? verdict : "unjudged",
      },
      MARKS[verdict] || "?",
    );

  function walkList(event) {
    const moves = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      event.preventDefault();
      turnStep(event.key === "ArrowLeft" ? -1 : 1);
      setTimeout(() => browser.list.querySelector("button.row")?.focus(), state.served ? 200 : 30);
      return;
    }
    if (!(event.key in moves)) return;
    event.preventDefault();
    const buttons = [...browser.list.querySelectorAll("button.row")],
      at = buttons.indexOf(document.activeElement);
    const to = Math.min(buttons.length - 1, Math.max(0, at + moves[event.key]));
    buttons[to]?.focus();
    if (browser.rows[to]) choose(browser.rows[to]);
  }

  function choose(row) {
    browser.chosen = row;
    browser.list
      .querySelectorAll("button.row")
      .forEach((button, i) =>
        browser.rows[i] === row ? button.setAttribute("aria-current", "true") : button.removeAttribute("aria-current"),
      );
    showDetail();
  }

  async function showDetail() {
    const row = browser.chosen,
      box = browser.detail;
    if (!row) {
      box.replaceChildren();
      return;
    }
    const tab = (mode, words) =>
      el(
        "button",
        {
          type: "button",
          class: "plain",
          "data-mode": mode,
          "aria-pressed": String(browser.mode === mode),
          onclick: () => {
            browser.mode = mode;
            showDetail().then(() => box.querySelector(`[data-mode=${mode}]`)?.focus());
          },
        },
        words,
      );
    const tip = el("p", { class: "tip", role: "status" });
    const tools = el(
      "div",
      { class: "tools" },
      el(
        "span",
        { class: "tabs", role: "group", "aria-label": "Show" },
        tab("one", "This rollout"),
        tab("group", "Its group side by side"),
        tab("prompt", "This prompt over the run"),
      ),
      paintMenu(row),
      paintKey(),
    );
    const pile = el("div", { class: browser.mode === "one" ? "pile" : "pile beside" });
    let rows = [row],
      head = "";
    try {
      if (browser.mode === "group") rows = await findAll({ step: row.step, kind: row.kind, group: row.group_id });
      if (browser.mode === "prompt")
        rows = (await findAll({ prompt: row.prompt_id }))
          .filter((each) => each.prompt_id === row.prompt_id)
          .sort((a, b) => a.step - b.step);
    } catch (error) {
      head = String(error.message);
    }
    if (browser.chosen !== row) return;
    if (browser.mode !== "one") {
      const right = rows.filter((each) => each.verdict === "right").length;
      head =
        head ||
        (browser.mode === "group"
          ? `${rows.length} of this group, ${right} right.`
          : `${rows.length} answers to this prompt, ${right} right, the earliest first.`);
      const some = spread(rows, CARDS),
        rest = el(
          "button",
          {
            type: "button",
            class: "plain",
            onclick: () => {
              pile.replaceChildren(...rows.map((each) => card(each, false)));
              rest.remove();
            },
          },
          `Show all ${rows.length}`,
        );
      pile.append(...some.map((each) => card(each, false)));
      box.replaceChildren(
        tools,
        el(
          "div",
          { class: "rollout" },
          el("h4", {}, "prompt"),
          text(row.prompt),
          el("h4", {}, "answer"),
          text(row.answer),
        ),
        el("p", { class: "note" }, head),
        browser.mode === "prompt" ? course(rows) : "",
        pile,
        some.length < rows.length ? rest : "",
        tip,
      );
    } else {
      pile.append(card(row, true));
      box.replaceChildren(tools, pile, tip);
    }
    pile.addEventListener("pointerover", (event) => {
      tip.textContent = event.target.token ? describe(event.target.token) : "";
    });
  }

  /** At most so many rows, evenly spread, the first and the last among them. */
  const spread = (rows, most) =>
    rows.length <= most
      ? rows
      : Array.from({ length: most }, (_, i) => rows[Math.round((i * (rows.length - 1)) / (most - 1))]);

  /** The verdicts on one prompt, step by step. */
  function course(rows) {
    const steps = [...new Set(rows.map((row) => row.step))];
    return el(
      "ul",
      { class: "course", "aria-label": "Verdicts by step" },
      steps.map((step) =>
        el(
          "li",
          {},
          el("small", {}, `step ${step} `),
          rows.filter((row) => row.step === step).map((row) => mark(row.verdict)),
        ),
      ),
    );
  }

  function card(row, whole) {
    const ends = { stop: "", length: "cut off at the limit", cut: "cut by an update" };
    const words = [
      `step ${row.step}`,
      row.kind === "eval" ? "evaluation" : row.phase,
      row.level !== null && row.level !== undefined && row.level !== "" ? `level ${row.level}` : "",
      known(row.reward) ? `reward ${number(row.reward)}` : "",
      `${count(row.length)} tokens`,
      ends[row.finish] ?? row.finish,
      row.version !== null && row.version !== undefined && row.version !== "" ? `weights ${row.version}` : "",
      whole ? `prompt ${row.prompt_id}` : "",
      row.note,
    ];
    const header = el(
      "header",
      {},
      el(
        "b",
        { class: MARKS[row.verdict] ? row.verdict : "unjudged" },
        `${MARKS[row.verdict] || "?"} ${visible(row.verdict)}`,
      ),
      words.filter(Boolean).map((word) => el("span", {}, excerpt(word, 160))),
    );
    const title = (name) => el("h4", {}, name);
    return el(
      "article",
      { class: `rollout is-${MARKS[row.verdict] ? row.verdict : "unjudged"}` },
      header,
      whole ? [title("prompt"), text(row.prompt)] : null,
      whole ? title("response") : null,
      response(row),
      whole && row.answer ? [title("answer"), text(row.answer)] : null,
    );
  }

  /** A text as it is, the first SHOWN characters of it; a button shows the rest. */
  function text(words) {
    words = String(words ?? "");
    const node = el(
      "pre",
      { dir: "auto", tabindex: words.length > 800 ? 0 : null },
      visible(words.slice(0, SHOWN)) || "(nothing)",
    );
    if (words.length <= SHOWN) return node;
    const button = el(
      "button",
      {
        type: "button",
        class: "plain",
        onclick: () => {
          node.textContent = visible(words);
          button.remove();
        },
      },
      `Show all ${count(words.length)} characters`,
    );
    return el("div", {}, node, button);
  }

  const PAINTS = { none: "no colours", log_probs: "log-prob", entropies: "entropy", drafted: "accepted drafts" };
  const STEPS = {
    log_probs: [
      [0.9, "0.9 and more"],
      [0.5, "0.5"],
      [0.2, "0.2"],
      [0.05, "0.05"],
      [0, "less"],
    ],
    entropies: [
      [0.1, "below 0.1 nats"],
      [0.5, "0.5"],
      [1, "1"],
      [2, "2"],
      [Infinity, "more"],
    ],
  };

  const paints = (row) =>
    Object.keys(PAINTS).filter(
      (key) =>
        key === "none" ||
        (Array.isArray(row.pieces) &&
          row.pieces.length &&
          (key === "drafted"
            ? typeof row.drafted === "string" && row.drafted.includes("1")
            : Array.isArray(row[key]) && row[key].length === row.pieces.length)),
    );

  function paintMenu(row) {
    const able = paints(row);
    if (able.length < 2) return null;
    const menu = el(
      "select",
      {
        "aria-label": "Colour the tokens by",
        id: "paint",
        onchange: () => {
          browser.paint = menu.value;
          showDetail().then(() => document.getElementById("paint")?.focus());
        },
      },
      able.map((key) => el("option", { value: key }, key === "none" ? PAINTS[key] : `colour by ${PAINTS[key]}`)),
    );
    menu.value = able.includes(browser.paint) ? browser.paint : "none";
    return menu;
  }

  function paintKey() {
    if (!paints(browser.chosen).includes(browser.paint) || browser.paint === "none") return null;
    if (browser.paint === "drafted")
      return el("span", { class: "key" }, el("span", { class: "d1" }, "from an accepted draft"));
    return el(
      "span",
      { class: "key" },
      browser.paint === "log_probs" ? "probability of the token:" : "entropy before the token:",
      STEPS[browser.paint].map(([, words], i) => el("span", { class: "q" + i }, words)),
    );
  }

  /** Which of five shades a token gets: 0 is what the model was sure of. */
  function shade(row, i) {
    if (browser.paint === "drafted") return row.drafted[i] === "1" ? "d1" : null;
    const value = row[browser.paint][i];
    if (!known(value)) return null;
    const at =
      browser.paint === "log_probs"
        ? STEPS.log_probs.findIndex(([least]) => Math.exp(value) >= least)
        : STEPS.entropies.findIndex(([most]) => value < most);
    return at > 0 ? "q" + at : null;
  }

  /** The response, token by token where the run has recorded them. */
  function response(row) {
    const length = (row.pieces || []).reduce((sum, piece) => sum + piece.length, 0);
    if (!paints(row).includes(browser.paint) || browser.paint === "none" || length > SHOWN) return text(row.response);
    const node = el("pre", { dir: "auto", tabindex: length > 800 ? 0 : null });
    row.pieces.forEach((piece, i) => {
      const span = el("span", { class: shade(row, i) }, visible(piece));
      span.token = { row, i, piece };
      node.append(span);
    });
    return node;
  }

  function describe({ row, i, piece }) {
    const parts = [`token ${i + 1} “${excerpt(piece, 40)}”`];
    if (known(row.log_probs?.[i]))
      parts.push(`log-prob ${number(row.log_probs[i])}, probability ${share(Math.exp(row.log_probs[i]))}`);
    if (known(row.entropies?.[i])) parts.push(`entropy ${number(row.entropies[i])} nats`);
    if (typeof row.drafted === "string")
      parts.push(row.drafted[i] === "1" ? "from an accepted draft" : "written by the model itself");
    return parts.join("; ");
  }

  // ---- data that arrive, and what follows from them

  async function ask(path) {
    const answer = await fetch(path, { cache: "no-store" });
    const body = await answer.json().catch(() => ({ error: `The server answered with status ${answer.status}.` }));
    if (!answer.ok || body.error) throw new Error(body.error || `The server answered with status ${answer.status}.`);
    return body;
  }

  const lastStep = (run) => last(column(run, "step")) ?? -1;

  /** Puts the newer rows of each run behind those that are here. Returns false where runs came or went. */
  function merge(newer) {
    const page = state.page,
      names = (runs) => JSON.stringify(runs.map((run) => run.name));
    if (names(newer.runs) !== names(page.runs)) return false;
    newer.runs.forEach((fresh, i) => {
      const run = page.runs[i];
      if (!fresh.reset) {
        const steps = column(run, "step"),
          from = lastStep(run),
          add = column(fresh, "step")
            .map((step, k) => [step, k])
            .filter(([step]) => step > from)
            .map(([, k]) => k);
        const series = {};
        for (const key of new Set([...Object.keys(run.series), ...Object.keys(fresh.series)])) {
          const old = run.series[key] || steps.map(() => null),
            tail = fresh.series[key] || [];
          series[key] = old.concat(add.map((k) => tail[k] ?? null));
        }
        const seen = run.pictures.length ? last(run.pictures).step : -1;
        fresh.series = series;
        fresh.pictures = run.pictures.concat(fresh.pictures.filter((picture) => picture.step > seen));
      }
      page.runs[i] = fresh;
    });
    Object.assign(page, {
      title: newer.title,
      note: newer.note,
      live: newer.live,
      cursor: newer.cursor,
      arms: newer.arms,
      compare: newer.compare,
    });
    return true;
  }

  /** Metrics that follow from others: the share of tokens that came from drafts. */
  function derive(run) {
    const saved = column(run, "draft/saved"),
      tokens = column(run, "rollout/tokens");
    if (saved.length && tokens.length)
      run.series["draft/saved_share"] = saved.map((n, i) => (known(n) && tokens[i] > 0 ? n / tokens[i] : null));
  }

  /** Shows what has changed: charts in view at once, the others when they come into view. */
  function update() {
    state.page.runs.forEach(derive);
    headline();
    state.sliders.forEach((slider) => slider.show());
    for (const section of state.sections) {
      let any = false;
      for (const part of section.parts) {
        const there = part.has();
        part.figure.hidden = !there;
        any = any || there;
        if (there && part.update) part.update();
        if (typeof part.title === "function") part.heading.textContent = part.title();
        if (part.model) {
          part.dirty = true;
          if (there && part.seen) draw(part);
        }
      }
      section.node.hidden = !any;
      fillRows(section.grid);
    }
    drawLinks();
  }

  /** A card that would stand alone in its row takes all of it. */
  function fillRows(grid) {
    let row = [];
    const end = () => {
      row.forEach((card, i) => card.classList.toggle("lone", row.length % 2 === 1 && i === row.length - 1));
      row = [];
    };
    for (const card of grid.children) {
      if (card.hidden) continue;
      if (card.classList.contains("wide")) end();
      else row.push(card);
    }
    end();
  }

  /** The page of the book, or one chapter of it. */
  function build() {
    const page = state.page;
    document.title = state.book.title;
    watcher.disconnect();
    sizes.disconnect();
    document.getElementById("main").replaceChildren();
    Object.assign(state, { charts: [], sliders: [], sections: [] });
    if (!page.arms || !page.arms.length) page.arms = page.runs.map((run, i) => ({ name: run.name, runs: [i] }));
    state.run = Math.min(state.run, Math.max(0, page.runs.length - 1));
    if (!page.runs.length) {
      headline();
      return;
    }
    controls();
    addSection("learning", "", "", accuracySection).short = "Accuracy";
    addSection("compare", "The numbers", "", compareSection).short = "Numbers";
    addSection("training", "How the training goes", "", trainingSection).short = "Training";
    addSection(
      "rollout-flow",
      "Where the rollouts went",
      "Only groups with both right and wrong answers teach.",
      flowSection,
    ).short = "Rollouts spent";
    addSection("time-budget", "Where the time went", "", timeSection).short = "Time";
    addSection("speculation", "Does speculation pay?", "", speculationSection).short = "Speculation";
    addSection("rollouts", "What the model wrote", "", rolloutSection).short = "Texts";
    addSection("settings", "Settings", "", settingsSection);
    document.getElementById("foot").textContent =
      "Charts: focus one and press the arrow keys to read single points; press a name under a chart to hide its line.";
    update();
  }

  function say(words) {
    let node = document.getElementById("server-message");
    if (!node)
      document
        .getElementById("top")
        .after((node = el("p", { class: "message", id: "server-message", role: "status" })));
    node.hidden = !words;
    node.textContent = words;
  }

  async function poll() {
    try {
      const fresh = await ask(state.page.cursor ? `data?after=${encodeURIComponent(state.page.cursor)}` : "data");
      if (!state.page.cursor)
        fresh.runs.forEach((run) => {
          run.reset = true;
        });
      const news = (page) =>
        JSON.stringify([
          page.cursor,
          page.note,
          page.runs.map((run) => [run.name, run.state, run.note, run.rollouts.total]),
        ]);
      if (news(fresh) === news(state.page)) state.page.live = fresh.live;
      else if (merge(fresh)) update();
      else {
        state.book = state.page = await ask("data");
        build();
      }
      say("");
    } catch (error) {
      say(`The server does not answer; the page shows what it had. ${error.message}`);
    }
    if (state.page.live) setTimeout(poll, POLL_MS);
  }

  async function start() {
    const inside = document.getElementById("data").textContent.trim();
    state.served = !inside;
    try {
      state.book = inside ? JSON.parse(inside) : await ask("data");
      state.page = state.book.chapters?.length ? state.book.chapters[0] : state.book;
      if (state.page.arms?.length > 1) state.axis = "tokens_generated"; // what arms differ in is cost
    } catch (error) {
      say(`The data of the page cannot be read: ${error.message}`);
      return;
    }
    build();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      state.charts.forEach((chart) => {
        chart.signature = "";
      });
      update();
    });
    if (state.served && state.page.live) setTimeout(poll, POLL_MS);
  }

  start();
})();
