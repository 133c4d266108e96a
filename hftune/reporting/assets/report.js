// Draws the curves of report.html with uPlot, and makes its buttons work. What the page says is in the element #data.
"use strict";
(() => {
  const { runs, charts } = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const NUM_COLORS = 7;
  const DASHES = [[], [7, 4], [2, 3]]; // once the colours are used up
  const WHOLE = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((part) => part * 10 ** power)).flat(); // of steps
  const MANY = 500; // points, from which curves are smoothed at first: they would be a band of ink
  const FEW = 60; // points, up to which each is marked
  const isDense = charts.some(({ lines }) => lines.some((line) => line.smooth && line.points[0].length > MANY));
  const view = { log: false, axis: "step", smoothing: isDense ? 0.9 : 0, zoom: null, hidden: new Set() };
  let plots = [];

  // Colours

  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;
  function color(name) {
    // resolves light-dark(), which a canvas does not know
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  }
  const faint = (rgb) => rgb.replace(/^rgba?\(([^)]+)\)$/, (_, parts) => `rgba(${parts.split(",").slice(0, 3)}, 0.28)`);
  const curveColor = (index) => color(`curve-${index % NUM_COLORS}`);
  const dash = (index) => DASHES[Math.floor(index / NUM_COLORS) % DASHES.length];

  // Numbers

  const tidy = (text) => text.replace("-", "\u2212");
  const SIZES = [
    ["T", 1e12],
    ["G", 1e9],
    ["M", 1e6],
    ["k", 1e3],
  ];
  function withSize(value, format) {
    const [letter, size] = SIZES.find(([, size]) => Math.abs(value) >= size) || ["", 1];
    return format(value / size) + letter;
  }
  function readout(value, unit) {
    if (value == null) return "\u2013";
    if (unit === "%") return `${tidy((100 * value).toPrecision(3))} %`;
    if (unit === "B") return withSize(value, (v) => `${+v.toPrecision(3)} `) + "B";
    const text =
      value && Math.abs(value) < 1e-3
        ? value.toExponential(2)
        : Math.abs(value) >= 1000
          ? Math.round(value).toLocaleString("en")
          : String(+value.toPrecision(4));
    return tidy(unit ? `${text} ${unit}` : text);
  }
  function ticks(values, unit) {
    // with as many digits as tell neighbours apart, all of them in the same way
    const scale = unit === "%" ? 100 : 1,
      shown = values.map((value) => (value == null ? null : value * scale));
    const real = shown.filter((value) => value != null),
      steps = real.slice(1).map((value, index) => value - real[index]);
    const least = Math.min(...steps.map(Math.abs)),
      most = Math.max(...real.map(Math.abs));
    let digits = 0;
    while (
      digits < 8 &&
      steps.some((step) => Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6 * 10 ** digits * least)
    )
      digits += 1;
    const isSmall = most < 5e-3 && digits > 4,
      isLarge = most >= 1e4;
    return shown.map((value) => {
      if (value == null) return "";
      if (value === 0) return "0";
      if (isSmall) return tidy((+value.toPrecision(6)).toExponential());
      return tidy(isLarge ? withSize(value, (v) => String(+v.toPrecision(6))) : value.toFixed(digits));
    });
  }

  // Data

  function smoothed(values, weight) {
    // exponential moving mean; corrected for its start, so that it begins at the first value
    let mean = 0,
      sum = 0;
    return values.map((value) => {
      if (value == null) return value;
      mean = weight * mean + (1 - weight) * value;
      sum = weight * sum + (1 - weight);
      return mean / sum;
    });
  }
  const across = (line, step) => (view.axis === "epoch" ? step * runs[line.run].epochs : step);
  const fullRange = () => {
    let most = 0;
    for (const { lines } of charts) for (const line of lines) most = Math.max(most, across(line, line.points[0].at(-1)));
    return [0, most || 1];
  };

  /* The series of a chart, several for a line: its points, faint if it is smoothed, the smoothed ones, and the best one. */
  function seriesOf(chart, isLog) {
    const found = [];
    const thicker = runs.length > 1 && chart.lines.length <= 3 ? 2 : 0; // below: runs that coincide can all be seen
    chart.lines.forEach((line, index) => {
      const drawn = ([steps, values]) => [
        steps.map((step) => across(line, step)),
        isLog ? values.map((value) => (value > 0 ? value : null)) : values,
      ];
      const [xs, ys] = drawn(line.points);
      const place = runs.length > 1 && chart.lines.length <= runs.length ? line.run : index;
      const stroke = curveColor(place),
        isSmooth = view.smoothing > 0 && line.smooth && xs.length > FEW / 4;
      const isShort = (xs.length <= (line.smooth ? FEW / 4 : FEW) && chart.key !== "train/lr") || xs.length === 1;
      const common = { index, dash: dash(place), show: !view.hidden.has(`${chart.key} ${index}`) };
      const [meanXs, means] = isSmooth ? drawn(line.means || line.points) : [xs, ys]; // of a thinned curve, not of its extremes
      if (isSmooth) found.push({ ...common, data: [xs, ys], stroke: faint(stroke), width: 1 });
      found.push({
        ...common,
        data: [meanXs, isSmooth ? smoothed(means, view.smoothing) : ys],
        stroke,
        width: 1.75 + thicker * (chart.lines.length - 1 - index),
        isMain: true,
        points: isShort ? { show: true, size: 6, fill: stroke, stroke } : { show: false },
      });
      if (line.best) {
        const [step, value] = line.best;
        const points = { show: true, size: 13, width: 2, fill: "transparent", stroke };
        found.push({ ...common, data: [[across(line, step)], [value]], stroke, points, paths: () => null });
      }
    });
    return found;
  }

  /* The index of the nearest point of a series: charts of several curves have points where only one of them has a value. */
  function nearest(values, xs, at) {
    let left = at,
      right = at;
    while (left >= 0 && values[left] == null) left -= 1;
    while (right < values.length && values[right] == null) right += 1;
    if (left < 0) return right < values.length ? right : null;
    if (right >= values.length) return left;
    return xs[at] - xs[left] <= xs[right] - xs[at] ? left : right;
  }

  /* The range of the vertical axis; a curve without ups and downs lies in its middle. */
  function around(u, min, max) {
    if (min == null) return [0, 1];
    if (min === 0 && max === 0) return [0, 1];
    return min === max ? [min - Math.abs(min) / 10, max + Math.abs(max) / 10] : uPlot.rangeNum(min, max, 0.08, true);
  }

  function aroundLog(u, min, max) {
    if (min == null) return [1, 10];
    const pad = Math.max((max / min) ** 0.06, 1.03);
    return [min / pad, max * pad];
  }
  /* Ticks of a logarithmic axis: 1, 2, 5, 10 ... if it spans much, evenly spaced round numbers otherwise. */
  function logTicks(u, axis, min, max) {
    const found = [],
      power = 10 ** Math.floor(Math.log10(max > 8 * min ? min : max - min));
    if (max <= 8 * min) {
      const step = power * [0.1, 0.2, 0.5, 1, 2, 5].find((part) => (max - min) / (part * power) <= 5);
      for (let tick = Math.ceil(min / step) * step; tick <= max; tick += step) found.push(+tick.toPrecision(12));
      return found;
    }
    const parts = max > 2000 * min ? [1] : [1, 2, 5];
    for (let decade = power; decade <= max; decade *= 10)
      for (const part of parts) if (part * decade >= min && part * decade <= max) found.push(+(part * decade).toPrecision(12));
    return found;
  }

  // Charts

  function make(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function drawAll() {
    const scroll = window.scrollY;
    plots.forEach(({ plot }) => plot.destroy());
    $("charts").replaceChildren();
    const cards = charts.map(addCard); // all of them before the first is drawn: a row shares its width among them
    plots = charts.map((chart, index) => draw(chart, cards[index], index === 0));
    $("reset").disabled = !view.zoom;
    window.scrollTo(0, scroll);
  }

  /* Adds an empty card for a chart below the heading of its group; the first one, the loss, has a row of its own. */
  function addCard(chart, index) {
    if (!index || charts[index - 1].group !== chart.group) $("charts").append(make("h3", "", chart.group), make("div", "grid"));
    else if (index === 1) $("charts").append(make("div", "grid"));
    const card = make("div", "chart"),
      title = make("h4", "", chart.title);
    const scale = view.log
      ? { linear: "linear: most values are not above 0", part: "values that are not above 0 are left out" }[logKind(chart)]
      : "";
    const remark = [chart.unit, scale].filter(Boolean).join(", ");
    if (remark) title.append(" ", make("span", "", `(${remark})`));
    title.title = chart.key;
    const legend = make("div", "legend"),
      box = make("div", "plot");
    card.append(title, legend, box);
    $("charts").lastChild.append(card);
    return { legend, box };
  }

  /* Whether a chart can have a logarithmic axis: "whole", "part" or, if most of its values are not above 0, "linear". */
  function logKind(chart) {
    const values = chart.lines.flatMap((line) => line.points[1]).filter((value) => value != null);
    const above = values.filter((value) => value > 0).length;
    return above === values.length ? "whole" : above * 2 > values.length ? "part" : "linear";
  }

  function draw(chart, { legend, box }, isFirst) {
    const isLog = view.log && logKind(chart) !== "linear",
      unit = ["%", "B"].includes(chart.unit) ? chart.unit : ""; // the title has the others
    const series = seriesOf(chart, isLog);
    const data = uPlot.join(series.map((one) => one.data));
    const range = view.zoom || fullRange();
    const muted = color("muted"),
      line = color("line");
    const axis = {
      stroke: muted,
      font: "12px system-ui, sans-serif",
      grid: { stroke: line, width: 1 },
      ticks: { show: false },
    };
    const plot = new uPlot(
      {
        width: box.clientWidth || 320,
        height: isFirst ? 300 : 210,
        pxAlign: 0,
        legend: { show: false },
        scales: {
          x: {
            time: false,
            min: range[0],
            max: range[1],
            range: (u, min, max) => (min === max ? [min - 1, max + 1] : [min, max]),
          },
          y: isLog ? { distr: 3, range: aroundLog } : { range: around },
        },
        cursor: {
          sync: {
            key: "report",
            setSeries: false,
            scales: ["x", null],
            filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
          },
          drag: { x: true, y: false, setScale: false },
          dataIdx: (u, index, at) => (index === 0 || u.data[index][at] != null ? at : nearest(u.data[index], u.data[0], at)),
          points: {
            size: (u, index) => (index > 0 && series[index - 1].isMain ? 8 : 0),
            fill: (u, index) => series[index - 1].stroke,
            width: 0,
          },
          bind: {
            dblclick: () => () => {
              zoom(null);
              return null;
            },
          },
        },
        axes: [
          {
            ...axis,
            size: 30,
            space: 60,
            ...(view.axis === "step" ? { incrs: WHOLE } : {}),
            values: (u, values) => ticks(values, ""),
          },
          {
            ...axis,
            space: 34,
            gap: 6,
            ...(isLog ? { splits: logTicks, filter: (u, values) => values } : {}),
            size: (u, texts) => (texts ? 16 + 6.6 * Math.max(...texts.map((text) => (text || "").length)) : 40),
            values: (u, values) =>
              isLog && u.scales.y.max > 8 * u.scales.y.min
                ? values.map((value) => (value < 0.01 ? tidy(value.toExponential()) : readout(value, unit)))
                : ticks(values, chart.unit),
          },
        ],
        series: [
          {},
          ...series.map(({ stroke, width, dash, points, paths, show }) => ({
            stroke,
            width: width || 1,
            dash,
            points: points || { show: false },
            paths,
            show,
            spanGaps: false,
            pxAlign: 0,
          })),
        ],
        hooks: {
          setCursor: [(u) => tell(u)],
          setSelect: [
            (u) =>
              u.select.width > 4 && zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]),
          ],
        },
      },
      data,
      box,
    );

    const mouse = { pointerdown: "mousedown", pointermove: "mousemove", pointerup: "mouseup" };
    for (const type of Object.keys(mouse)) {
      // uPlot knows the mouse only; a finger that moves sideways does the same
      plot.over.addEventListener(type, (event) => {
        if (event.pointerType !== "touch") return;
        const { clientX, clientY } = event;
        plot.over.dispatchEvent(new MouseEvent(mouse[type], { clientX, clientY, movementX: 1, bubbles: true, view: window }));
      });
    }

    const where = make("span", "", ""),
      outputs = [];
    chart.lines.forEach((one, index) => {
      const key = `${chart.key} ${index}`,
        button = make("button"),
        mark = make("span", "swatch"),
        output = make("b");
      const shown = series.findIndex((entry) => entry.isMain && entry.index === index);
      mark.style.background = series[shown].stroke;
      button.type = "button";
      button.title = "Show or hide this curve";
      button.setAttribute("aria-pressed", String(!view.hidden.has(key)));
      button.append(mark, `${one.label} `, output);
      button.onclick = () => {
        view.hidden.has(key) ? view.hidden.delete(key) : view.hidden.add(key);
        button.setAttribute("aria-pressed", String(!view.hidden.has(key)));
        series.forEach((entry, place) => entry.index === index && plot.setSeries(place + 1, { show: !view.hidden.has(key) }));
      };
      legend.append(chart.lines.length > 1 || runs.length > 1 ? button : output);
      outputs.push({ output, line: one, place: shown + 1 });
    });
    legend.append(where);

    function tell(u) {
      // what is under the cursor; without one, the best value or the last
      const at = u.cursor.idx;
      for (const { output, line: one, place } of outputs) {
        const values = u.data[place];
        if (at != null) output.textContent = readout(values[u.cursor.idxs[place] ?? at], unit);
        else if (one.best) output.textContent = `best ${readout(one.best[1], unit)}`;
        else
          output.textContent = readout(
            values.findLast((value) => value != null),
            unit,
          );
      }
      where.textContent = at == null ? "" : `${view.axis} ${readout(u.data[0][at], "")}`;
    }
    tell(plot);

    const last = chart.lines.map(
      (one) =>
        `${one.label} from step ${one.points[0][0]} to ${one.points[0].at(-1)}, ` +
        `last value ${readout(one.points[1].at(-1), chart.unit)}`,
    );
    box.tabIndex = 0;
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", `${chart.title}: ${last.join("; ")}`);
    box.onkeydown = (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") zoom(null);
      if (!move) return;
      event.preventDefault();
      const count = plot.data[0].length,
        at = plot.cursor.idx ?? (move > 0 ? -1 : count);
      const next = Math.max(0, Math.min(count - 1, at + move * (event.shiftKey ? 10 : 1)));
      plot.setCursor({ left: plot.valToPos(plot.data[0][next], "x"), top: 10 });
    };
    return { plot, box };
  }

  function zoom(range) {
    view.zoom = range;
    $("reset").disabled = !range;
    const [min, max] = range || fullRange();
    for (const { plot } of plots) {
      plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      plot.setScale("x", { min, max });
    }
  }

  // Controls

  function onSwitch(id, change) {
    const buttons = [...$(id).children];
    for (const button of buttons) {
      button.onclick = () => {
        buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
        change(button.dataset.value);
        drawAll();
      };
    }
  }

  if ($("charts")) {
    onSwitch("scale", (value) => {
      view.log = value === "log";
    });
    onSwitch("axis", (value) => {
      view.axis = value;
      view.zoom = null;
    });
    $("axis").hidden = !runs.every((run) => run.epochs > 0);
    $("smoothing").value = view.smoothing;
    $("smoothed").textContent = view.smoothing;
    $("smoothing").oninput = (event) => {
      view.smoothing = +event.target.value;
      $("smoothed").textContent = event.target.value;
      drawAll();
    };
    $("reset").onclick = () => zoom(null);
    drawAll();
    new ResizeObserver(() =>
      plots.forEach(({ plot, box }) => {
        if (box.clientWidth && box.clientWidth !== plot.width) plot.setSize({ width: box.clientWidth, height: plot.height });
      }),
    ).observe($("charts"));
  }

  function paint() {
    // what depends on the theme
    for (const mark of document.querySelectorAll(".swatch[data-run]")) mark.style.background = curveColor(+mark.dataset.run);
    if ($("charts")) drawAll();
  }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  function setTheme(theme) {
    document.documentElement.style.colorScheme = theme;
    $("theme").textContent = (theme ? theme === "dark" : dark.matches) ? "Light" : "Dark";
    paint();
  }
  let theme = "";
  try {
    theme = localStorage.getItem("hftune-theme") || "";
  } catch {
    /* a browser may keep nothing for files */
  }
  setTheme(theme);
  dark.onchange = () => setTheme(theme);
  onbeforeprint = () => setTheme("light");
  onafterprint = () => setTheme(theme);
  $("theme").onclick = () => {
    theme = $("theme").textContent.toLowerCase();
    try {
      localStorage.setItem("hftune-theme", theme);
    } catch {
      /* then it holds until the page is closed */
    }
    setTheme(theme);
  };

  for (const button of document.querySelectorAll(".copy")) {
    button.onclick = async () => {
      const text = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(text.textContent);
        button.textContent = "Copied";
      } catch {
        // not every browser lets a file do it: select it, for Ctrl+C
        getSelection().selectAllChildren(text);
        button.textContent = "Selected";
      }
      setTimeout(() => {
        button.textContent = "Copy";
      }, 2000);
    };
  }
})();
