window.weft = data.kind === "simulate" ? startSimulate() : startExplain();
