// Draws every figure of the page in the colours of its theme, and again when the theme changes.
(() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const config = { responsive: true, displaylogo: false, displayModeBar: false };

  function colors() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    return {
      "font.color": color("--ink"),
      "hoverlabel.bgcolor": color("--card"),
      "hoverlabel.bordercolor": color("--rule"),
      "hoverlabel.font.color": color("--ink"),
    };
  }

  async function draw(slug) {
    const { data, layout } = figures[slug];
    const theme = colors();
    const themed = {
      ...layout,
      font: { ...layout.font, color: theme["font.color"] },
      hoverlabel: { bgcolor: theme["hoverlabel.bgcolor"], bordercolor: theme["hoverlabel.bordercolor"],
        font: { color: theme["hoverlabel.font.color"] } },
      // A finger scrolls the page; it must not zoom into the figure under it.
      dragmode: isTouch ? false : "zoom",
    };
    const plot = await Plotly.newPlot(slug, data, themed, config);
    // Names take as many lines as the width needs, and no height from the curves.
    const names = plot.querySelector(".legend .bg");
    if (names) await Plotly.relayout(plot, { height: layout.height + names.getBBox().height });
  }

  Object.keys(figures).forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    Object.keys(figures).forEach((slug) => Plotly.relayout(slug, colors()));
  });
})();
