// Looks at the files again while the page is in front: a file may be exchanged, repaired or finish downloading.

const EVERY = 2500; // milliseconds; an unchanged file costs the server one stat

export function watchFiles(panels) {
  const look = () => {
    if (document.visibilityState !== "visible") return;
    panels.forEach((panel) => panel.refresh());
  };
  setInterval(look, EVERY);
  document.addEventListener("visibilitychange", look);
  window.addEventListener("focus", look);
}
