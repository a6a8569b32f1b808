// The chart of a run: tokens of each step, and the rate. Loaded with the first answer.

import uPlot from "./vendor/uplot.js";

const HEIGHT = 150;

export class Chart {
  constructor(element) {
    this.element = element;
    const colour = (name) => {
      element.style.color = `var(${name})`; // a canvas takes computed colours only
      return getComputedStyle(element).color;
    };
    const [text, bars, line, grid] = ["--quiet", "--bars", "--accent", "--line"].map(colour);
    const axis = {
      stroke: text,
      grid: { stroke: grid, width: 1 },
      ticks: { show: false },
      font: "12px system-ui",
      size: 44,
    };
    const options = {
      width: this.width,
      height: HEIGHT,
      legend: { show: false },
      cursor: { show: false },
      scales: {
        x: { time: false },
        tokens: { range: (_, __, max) => [0, Math.max(2, max + 1)] },
        rate: { range: (_, __, max) => [0, 1.1 * max || 1] },
      },
      axes: [
        { ...axis, size: 28, grid: { show: false }, values: (_, values) => values.map((value) => `${value} s`) },
        { ...axis, scale: "tokens", incrs: [1, 2, 5, 10, 20] },
        { ...axis, scale: "rate", side: 1, grid: { show: false } },
      ],
      series: [
        {},
        {
          scale: "tokens",
          fill: bars,
          stroke: bars,
          paths: uPlot.paths.bars({ size: [0.8, 14] }),
          points: { show: false },
        },
        { scale: "rate", stroke: line, width: 2, points: { show: false } },
      ],
    };
    this.plot = new uPlot(options, [[], [], []], element);
    new ResizeObserver(() => this.plot.setSize({ width: this.width, height: HEIGHT })).observe(element);
  }

  get width() {
    return Math.max(200, this.element.clientWidth);
  }

  render(run) {
    const seconds = run.steps.map((step) => step.at / 1000);
    this.plot.setData([seconds, run.steps.map((step) => step.tokens), run.steps.map((_, step) => run.rateAt(step))]);
  }
}
