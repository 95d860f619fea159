// A cross and the values under the pointer, in charts that carry them.
for (const plot of document.querySelectorAll('.plot[data-at]')) {
  const split = s => s.split('|'), d = plot.dataset;
  const at = split(d.at).map(Number), x = split(d.x), names = split(d.names);
  const values = d.values.split('\n').map(split);
  const cross = document.createElement('div'), tip = document.createElement('div');
  cross.className = 'cross'; tip.className = 'tip';
  plot.addEventListener('pointermove', e => {
    const box = plot.getBoundingClientRect(), where = (e.clientX - box.left) / box.width;
    if (where < -0.02 || where > 1.02) return;
    let n = 0;
    at.forEach((a, i) => { if (Math.abs(a - where) < Math.abs(at[n] - where)) n = i; });
    tip.textContent = [x[n], ...names.map((m, i) => m + '  ' + (values[i][n] || '-'))].join('\n');
    cross.style.left = 100 * at[n] + '%';
    const right = at[n] > 0.5;
    tip.style.left = right ? '' : 'calc(' + 100 * at[n] + '% + 8px)';
    tip.style.right = right ? 'calc(' + 100 * (1 - at[n]) + '% + 8px)' : '';
    plot.append(cross, tip);
  });
  plot.addEventListener('pointerleave', () => { cross.remove(); tip.remove(); });
}
