/*
 * A rank whose forward ends early, and its peers, which go on: docs/design/forwards.md.
 * docs/design/model.md says what it tells and what is left out.
 *
 *   RANKS       world size, 2 or 3
 *   BOUND       k; there are 2(k + 1) slots, and no credit is looked at
 *   FORWARDS    that every rank makes
 *   CALLS       of modules in a forward, at most; there are two modules
 *   FAULTS      how many forwards end early, on any ranks, between any two calls
 *   INTERRUPTS  1: an end may be an interrupt, which leaves the forward open; 0: all are exceptions
 *   DEATHS      how many ranks may die, at any step
 *   MEET        1: ranks meet between forwards, in a collective of their callers'
 *
 * Rules, each 1 in what is built:
 *
 *   FOLLOW      a rank that ends early takes part in the calls that its peers still make; 0: once
 *               in each module that it has not called, and in no other
 *   ENDS        it goes on until all peers have ended the forward; 0: while it finds a call
 *   NUMBERS     it takes part in calls of that forward; 0: in all that it finds
 *   TELL_FIRST  it tells its own end before it takes part; 0: afterwards
 *   AT_ONCE     an exception leaves the forward when that is done; 0: it leaves at once, and all is
 *               done when the next forward begins
 *   LEFT_OPEN   what an interrupt has left open is ended when the next forward begins; 0: never
 *   REFUSE      calls of a forward that was left open are refused; 0: they are answered
 *   LOOK        a rank that waits for its peers' ends looks whether they live; 0: it does not
 */

#define SLOTS (2 * (BOUND + 1))
/* Channels: the ids of modules 0 and 1, then their rows. */
#define IDS(module) (module)
#define ROWS(module) (2 + (module))
#define AT(channel, rank) ((channel) * RANKS + (rank))
#define SLOT(channel, rank, sequence) (AT(channel, rank) * SLOTS + (sequence) % SLOTS)
/* Messages of `from` that have arrived at `to`; the peers are served in the order from + 1, ... */
#define IS_SERVED(channel, from, to) \
  (sending_on[from] == (channel) + 1 && served[from] > ((to) + RANKS - (from) - 1) % RANKS)
#define SENT(channel, from, to) \
  (posted[AT(channel, from)] + (IS_SERVED(channel, from, to) -> 1 : 0))
/* Whether the oldest message of `from` that is not released is there. */
#define IS_HERE(channel, from) \
  ((from) == me || SENT(channel, from, me) > released[AT(channel, me)])
#define ALL_HERE(channel) \
  (IS_HERE(channel, 0) && IS_HERE(channel, 1) && IS_HERE(channel, RANKS - 1))
#define UNDER_WAY(channel) (posted[AT(channel, me)] - released[AT(channel, me)])
#define ALL(word, least) (word[0] >= (least) && word[1] >= (least) && word[RANKS - 1] >= (least))
#define LOST (poisoned || dead[0] || dead[1] || dead[RANKS - 1])

/* Every message says which call of its module it belongs to. */
#define LABEL(forward, place) ((forward) * 8 + (place))
#define FORWARD(label) ((label) / 8)
#define PLACE(label) ((label) % 8)
#define NEXT_LABEL(module, from) label_in[SLOT(IDS(module), from, posted[AT(IDS(module), me)])]
#define CALLS_FROM(module, from) \
  ((from) != me && SENT(IDS(module), from, me) > posted[AT(IDS(module), me)] && \
   (!NUMBERS || FORWARD(NEXT_LABEL(module, from)) == forward))
#define IS_CALLED(module) \
  (CALLS_FROM(module, 0) || CALLS_FROM(module, 1) || CALLS_FROM(module, RANKS - 1))

byte posted[4 * RANKS];
byte released[4 * RANKS];
byte sending_on[RANKS]; /* channel + 1 of the post under way */
byte served[RANKS];     /* peers that have its message */
byte label_in[4 * RANKS * SLOTS];
bool refused_in[2 * RANKS * SLOTS];

byte ended[RANKS];    /* what a rank tells: forwards that it has ended */
byte returned[RANKS]; /* forwards after which its caller had control, and could load weights */
bool dead[RANKS];
bool poisoned;

/* What the model calls, decided by the rank that comes first. 1, 2: a module; 3: nothing more. */
byte program[FORWARDS * (CALLS + 1)];

byte faults;
byte deaths;

mtype = { idle, running, sending_ids, awaiting_ids, sending_rows, wanting, ending, over };

/* Loop variables, 0 between steps. */
byte i;
byte label_of;
bool found;

inline check_labels(channel) {
  for (i : 0 .. RANKS - 1) {
    label_of = label_in[SLOT(channel, i, released[AT(channel, me)])];
    if
    :: label_of != label_in[SLOT(channel, me, released[AT(channel, me)])] ->
      printf("rank %d takes rank %d's call %d of forward %d for another\n", me, i, PLACE(label_of),
             FORWARD(label_of));
      assert(false)
    :: else
    fi
  }
  i = 0;
  label_of = 0
}

inline put(channel, then) {
  if
  :: served[me] == 0 ->
    for (i : 0 .. RANKS - 1) {
      assert(i == me || posted[AT(channel, me)] < released[AT(channel, i)] + SLOTS)
    }
    i = 0;
    sending_on[me] = channel + 1;
    label_in[SLOT(channel, me, posted[AT(channel, me)])] = LABEL(forward, place)
  :: else
  fi;
  served[me]++;
  if
  :: served[me] == RANKS - 1 ->
    served[me] = 0;
    sending_on[me] = 0;
    posted[AT(channel, me)]++;
    phase = then
  :: else
  fi
}

/* This rank's part of a call of the forward. */
inline call(number, place_of) {
  module = number;
  place = place_of;
  calls[number]++;
  phase = sending_ids
}

/* Without a batch, in a call that a peer has made. */
inline take_part(number) {
  label_of = (CALLS_FROM(number, 0) -> NEXT_LABEL(number, 0) :
             (CALLS_FROM(number, 1) -> NEXT_LABEL(number, 1) : NEXT_LABEL(number, RANKS - 1)));
  printf("rank %d takes part in call %d of module %d in forward %d\n", me, PLACE(label_of), number,
         FORWARD(label_of));
  if
  :: FORWARD(label_of) != forward ->
    printf("rank %d has a batch for forward %d\n", me, FORWARD(label_of));
    assert(false)
  :: else
  fi;
  assert(PLACE(label_of) == calls[number]);
  call(number, PLACE(label_of));
  label_of = 0
}

inline tell_end() {
  ended[me] = forward + 1
}

inline begin_ending() {
  if
  :: TELL_FIRST -> tell_end()
  :: else
  fi;
  following = true;
  phase = ending
}

inline leave_open() {
  is_open = true;
  returned[me] = forward + 1;
  phase = idle
}

inline return_to_caller() {
  tell_end();
  returned[me] = forward + 1;
  if
  :: ALL(ended, forward + 1) ->
    for (i : 0 .. CALLS) {
      program[forward * (CALLS + 1) + i] = 0
    }
    i = 0
  :: else
  fi;
  forward++;
  at = 0;
  calls[0] = 0;
  calls[1] = 0;
  module = 0;
  place = 0;
  following = false;
  is_open = false;
  refusing = false;
  phase = idle
}

proctype Rank(byte me) {
  mtype phase = idle;
  byte forward;   /* the one that is open, or comes next */
  byte at;        /* in its program */
  byte calls[2];  /* of each module in it, so far */
  byte module;    /* of the call under way */
  byte place;
  bool following; /* the forward has ended here */
  bool is_open;   /* an earlier call has left it so */
  bool refusing;
  byte wanted;    /* module whose rows are waited for */
  mtype before;   /* ... from then on */
  do
  /* a forward begins */
  :: d_step {
      phase == idle && forward < FORWARDS && !is_open && (!MEET || ALL(returned, forward)) ->
      phase = running
    }
  :: d_step {
      phase == idle && forward < FORWARDS && is_open && (!MEET || ALL(returned, forward + 1)) ->
      if
      :: LEFT_OPEN -> begin_ending()
      :: else -> return_to_caller()
      fi
    }
  :: d_step { phase == idle && forward == FORWARDS -> phase = over }

  /* the model */
  :: d_step {
      phase == running && program[forward * (CALLS + 1) + at] == 0 && at == CALLS ->
      program[forward * (CALLS + 1) + at] = 3
    }
  :: d_step {
      phase == running && program[forward * (CALLS + 1) + at] == 0 && at < CALLS ->
      program[forward * (CALLS + 1) + at] = 1
    }
  :: d_step {
      phase == running && program[forward * (CALLS + 1) + at] == 0 && at < CALLS ->
      program[forward * (CALLS + 1) + at] = 2
    }
  :: d_step {
      phase == running && program[forward * (CALLS + 1) + at] == 0 && at < CALLS ->
      program[forward * (CALLS + 1) + at] = 3
    }
  :: d_step {
      phase == running && program[forward * (CALLS + 1) + at] % 3 != 0 ->
      label_of = program[forward * (CALLS + 1) + at] - 1;
      at++;
      printf("rank %d calls module %d in forward %d\n", me, label_of, forward);
      call(label_of, calls[label_of]);
      label_of = 0
    }
  :: d_step {
      phase == running && program[forward * (CALLS + 1) + at] == 3 ->
      printf("rank %d ends forward %d\n", me, forward);
      return_to_caller()
    }
  :: d_step {
      phase == running && faults < FAULTS ->
      printf("rank %d raises an exception in forward %d\n", me, forward);
      faults++;
      if
      :: AT_ONCE -> begin_ending()
      :: else -> leave_open()
      fi
    }
  :: d_step {
      phase == running && faults < FAULTS && INTERRUPTS ->
      printf("rank %d is interrupted in forward %d\n", me, forward);
      faults++;
      refusing = REFUSE;
      leave_open()
    }

  /* a call */
  :: d_step {
      phase == sending_ids ->
      refused_in[SLOT(IDS(module), me, posted[AT(IDS(module), me)])] = refusing;
      put(IDS(module), awaiting_ids)
    }
  :: d_step {
      phase == awaiting_ids && ALL_HERE(IDS(module)) ->
      check_labels(IDS(module));
      for (i : 0 .. RANKS - 1) {
        found = found || refused_in[SLOT(IDS(module), i, released[AT(IDS(module), me)])]
      }
      i = 0;
      released[AT(IDS(module), me)]++;
      if
      :: found && following -> phase = ending
      :: found && !following ->
        printf("rank %d raises BatchRefusedError in forward %d\n", me, forward);
        assert(INTERRUPTS);
        begin_ending()
      :: !found && returned[me] > forward ->
        printf("rank %d looks rows of forward %d up after its end\n", me, forward);
        assert(false)
      :: else -> phase = sending_rows
      fi;
      found = false
    }
  :: d_step {
      phase == sending_rows && UNDER_WAY(ROWS(module)) <= BOUND ->
      put(ROWS(module), (following -> ending : running))
    }
  :: d_step {
      phase == sending_rows && UNDER_WAY(ROWS(module)) > BOUND -> wanted = module;
      before = phase;
      phase = wanting
    }

  /* rows are used, in the forward or after it */
  :: d_step {
      (phase == running || phase == idle) && UNDER_WAY(ROWS(0)) > 0 ->
      before = phase;
      phase = wanting
    }
  :: d_step {
      (phase == running || phase == idle) && UNDER_WAY(ROWS(1)) > 0 ->
      wanted = 1;
      before = phase;
      phase = wanting
    }
  :: d_step {
      phase == wanting && ALL_HERE(ROWS(wanted)) ->
      check_labels(ROWS(wanted));
      released[AT(ROWS(wanted), me)]++;
      wanted = 0;
      phase = before;
      before = 0
    }

  /* the end of a forward that does not come to its last call */
  :: d_step {
      phase == ending && FOLLOW && IS_CALLED(0) -> take_part(0)
    }
  :: d_step {
      phase == ending && FOLLOW && IS_CALLED(1) -> take_part(1)
    }
  :: d_step {
      phase == ending && FOLLOW && (ALL(ended, forward + 1) || !ENDS) && !IS_CALLED(0) &&
          !IS_CALLED(1) ->
      printf("rank %d has ended forward %d\n", me, forward);
      return_to_caller()
    }
  :: d_step { phase == ending && !FOLLOW && calls[0] == 0 -> call(0, 0) }
  :: d_step { phase == ending && !FOLLOW && calls[1] == 0 -> call(1, 0) }
  :: d_step { phase == ending && !FOLLOW && calls[0] > 0 && calls[1] > 0 -> return_to_caller() }

  /* death, and the waits that it ends */
  :: d_step {
      phase != over && deaths < DEATHS ->
      printf("rank %d dies\n", me);
      deaths++;
      dead[me] = true;
      phase = over
    }
  :: d_step {
      LOST && (phase == awaiting_ids && !ALL_HERE(IDS(module)) ||
               phase == wanting && !ALL_HERE(ROWS(wanted)) || phase == ending && LOOK) ->
      printf("rank %d raises an error of the run\n", me);
      poisoned = true;
      phase = over
    }

  :: phase == over -> break
  od
}

init {
  atomic {
    for (i : 0 .. RANKS - 1) {
      run Rank(i)
    }
    i = 0
  }
}
