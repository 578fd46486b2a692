// Plays a race that the page already holds: tokens appear by their data-t, counters follow. Nothing is fetched.
() => {
  const calm = window.matchMedia("(prefers-reduced-motion: reduce)").matches;

  const show = (lane, time) => {
    const tokens = lane.tokens;
    while (lane.shown < tokens.length && tokens[lane.shown].time <= time) tokens[lane.shown++].element.classList.add("hs-on");
    const done = lane.shown === tokens.length;
    const last = lane.shown ? tokens[lane.shown - 1] : null;
    const steps = last ? last.step : 0; // forwards after the prompt's
    const clock = done && last ? last.time : time;
    lane.rate.textContent = clock > 0 ? (lane.shown / clock).toFixed(1) : "0.0";
    lane.perStep.textContent = steps ? ((lane.shown - 1) / steps).toFixed(2) : "0.00";
    lane.saved.textContent = String(Math.max(0, lane.shown - 1 - steps));
    lane.bar.style.width = tokens.length ? `${(100 * lane.shown) / tokens.length}%` : "0";
    lane.root.classList.toggle("hs-done", done);
    if (last) {
      const wanted = last.element.offsetTop - lane.text.clientHeight + 48;
      if (wanted > lane.text.scrollTop) lane.text.scrollTop = wanted;
    }
    return done;
  };

  const prepare = (race) => {
    const lanes = [...race.querySelectorAll(".hs-lane")].map((root) => ({
      root,
      tokens: [...root.querySelectorAll(".hs-text [data-t]")].map((element) => ({
        element,
        time: Number(element.dataset.t),
        step: Number(element.dataset.s),
      })),
      rate: root.querySelector(".hs-counters div:nth-child(1) dd"),
      perStep: root.querySelector(".hs-counters div:nth-child(2) dd"),
      saved: root.querySelector(".hs-counters div:nth-child(3) dd"),
      bar: root.querySelector(".hs-bar i"),
      text: root.querySelector(".hs-text"),
      shown: 0,
    }));
    const clock = race.querySelector(".hs-clock");
    const total = Number(race.dataset.seconds);
    const slower = Number(race.dataset.slower);
    let run = 0;

    const finish = () => {
      run += 1;
      for (const lane of lanes) show(lane, Infinity);
      clock.textContent = `${total.toFixed(2)} s`;
      race.classList.remove("hs-playing");
    };
    const play = () => {
      const mine = (run += 1);
      for (const lane of lanes) {
        lane.shown = 0;
        lane.text.scrollTop = 0;
        for (const token of lane.tokens) token.element.classList.remove("hs-on");
      }
      race.classList.add("hs-playing");
      const began = performance.now();
      const frame = (now) => {
        if (mine !== run || !race.isConnected) return;
        const time = Math.max(0, (now - began) / 1000 / slower);
        clock.textContent = `${Math.min(time, total).toFixed(2)} s`;
        const ended = lanes.map((lane) => show(lane, time));
        if (ended.every(Boolean)) finish();
        else requestAnimationFrame(frame);
      };
      requestAnimationFrame(frame);
    };
    race.querySelector(".hs-play").addEventListener("click", play);
    race.querySelector(".hs-skip").addEventListener("click", finish);
    if (calm) finish();
    else play();
  };

  let isRunning = false;
  const look = () => {
    const runs = document.querySelector(".hs-running") !== null;
    if (runs && !isRunning) document.querySelector("#controls").scrollIntoView({ block: "start" });
    isRunning = runs;
    for (const text of document.querySelectorAll(".hs-running .hs-text")) text.scrollTop = text.scrollHeight;
    for (const race of document.querySelectorAll(".hs-race:not(.hs-running, [data-ready])")) {
      race.dataset.ready = "";
      prepare(race);
    }
  };
  new MutationObserver(look).observe(document.body, { childList: true, characterData: true, subtree: true });
  look();
}
