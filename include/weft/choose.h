// Chooses a schedule for each layer and a layout for the batch: of those that fit the memory and are near the best by a
// quick estimate, the one that the simulator says is fastest. A pure function of its arguments, so all ranks get the
// same answer without talking.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "weft/cost.h"
#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/schedule.h"

namespace weft {

// Layers of a model with the same mask and shape.
struct Layer {
  Problem problem;
  Index heads_q = 1, heads_k = 1;
  TensorShape shape = {};
  Index count = 1;
  bool backward = true;  // false: only the forward counts
};

// What to choose among, and how much to spend on it.
struct ChooseOptions {
  double memory_bytes = 0;                      // of a rank for one layer's tensors and workspaces; 0: the machine's
  std::vector<ScheduleOptions> schedules = {};  // to choose among; empty: usual_schedules()
  // To choose among; empty: contiguous, zigzag, balanced, and dual_chunk where it can be.
  std::vector<LayoutKind> layouts = {};
  // What the simulations of a choice may look at, all layouts, layers and passes together: slices, and steps of all
  // ranks. The best by the estimate are simulated first; what is left out then, why() says. A count and not a time, so
  // that it ends at the same place on every rank. 0: what takes about 4 % of the time that 32 layers are estimated to
  // take, from 10,000 (some milliseconds) to 200,000.
  Index simulated_slices = 0;
};

// Every schedule with the options that are worth a try on so many ranks.
WEFT_API std::vector<ScheduleOptions> usual_schedules(const Machine& machine, Index ranks, Index heads_q,
                                                      Index heads_k);

// A schedule that was considered, and what it is predicted to take.
struct Candidate {
  ScheduleOptions schedule = {};
  double forward = 0, backward = 0;  // seconds of one layer
  Index memory = 0;                  // bytes of the rank that needs most, in the pass that needs most
  bool simulated = false;            // by simulate(), of all ranks; otherwise a quick estimate from a few
  bool fits = true;                  // the memory
  // The seconds are a lower bound, what its exchanges alone take, which is more than the third best takes in all. Its
  // memory was not predicted.
  bool at_least = false;
  std::string refused = {};  // why it cannot be made

  double seconds() const { return forward + backward; }
  bool usable() const { return fits && refused.empty(); }
};

// The choice of a schedule for one kind of layer, on given layouts.
struct WEFT_API ScheduleChoice {
  std::size_t chosen = 0;  // of the candidates
  std::vector<Candidate> candidates = {};
  double memory_bytes = 0;     // the budget
  double slices = 0;           // of all ranks, extrapolated from a few
  Index simulated_slices = 0;  // the budget of simulations
  std::size_t left_out = 0;    // candidates that are near by the estimate, and that this budget did not allow

  const Candidate& best() const { return candidates[chosen]; }
  const ScheduleOptions& schedule() const { return best().schedule; }
  // What it takes, what the others that were simulated would take, and what does not fit, as text.
  std::string why() const;
};
// Error if nothing fits, with what would.
WEFT_API ScheduleChoice choose_schedule(const Layer& layer, const Layouts& layouts, const Machine& machine,
                                        const ChooseOptions& options = {});

// The choice for a batch: one layout, and a schedule for each kind of layer.
struct WEFT_API BatchChoice {
  struct Tried {
    LayoutKind layout = LayoutKind::zigzag;
    double seconds = 0;        // of all layers
    bool simulated = false;    // otherwise a quick estimate
    std::string refused = {};  // why it cannot be made, or nothing fits
  };
  LayoutKind layout = LayoutKind::zigzag;
  double seconds = 0;
  bool simulated = false;  // otherwise a quick estimate: there are too many slices
  Index count = 1;         // layers of all kinds
  std::vector<ScheduleChoice> layers = {};
  std::vector<Tried> layouts = {};

  std::string why() const;
};
// All layers have the same packing. Error if they do not, or nothing fits.
WEFT_API BatchChoice choose(std::span<const Layer> layers, Index ranks, const Machine& machine,
                            const ChooseOptions& options = {});

}  // namespace weft
