/*
 * Rows that are refreshed in place: two copies of a table, readers that pin one of them for a
 * forward, and a keeper that writes to the other one. docs/design/row-refresh.md says what stands
 * for what.
 *
 *   PROCESSES     that read, each with THREADS threads that call one model
 *   SERIALS       versions that are announced, besides the first one
 *   DEADLINES     1: the keeper may give up while it waits, or be interrupted while it writes
 *   WHOLE         1: a version may come as a whole, in tables that stay as they are
 *   DEATHS        of the keeper. A successor can't write to the copies that it finds.
 *   KILLS         of processes that read
 *   CHECK         0: a reader does not look again which version a copy has, after its pin
 *   MARK          0: the keeper does not say before its first byte that a copy has no version
 *   AWAIT         0: the keeper does not wait for those that have pinned the copy
 *   DIRTY         0: the keeper forgets the rows of an attempt that did not succeed
 *   IDENTITY      0: the pins of a process that has died count on
 *   RESTORE       0: who takes a kept pin away does not look for forwards that may count on it
 */

#define ROWS 2
#define ALL 3 /* a set of rows: bit i for row i */
#define FIRST 1
#define LAST (FIRST + SERIALS)
#define COPIES (2 * (1 + DEATHS + 2 * WHOLE))
#define NONE 255
#define SIDE(copy) ((copy) & 1) /* whatever pair it is of */
#define HAS(set, row) (((set) >> (row)) & 1)

byte announced; /* the serial of what serves */
byte copy_of[LAST + 1]; /* which copy has it: the record that the page has of it */
bool constant[COPIES]; /* its version is a whole one, which has no side */
byte version[2]; /* of each side, on the page: its serial, or 0 while it is written */
byte cell[COPIES * ROWS]; /* of each row, the serial in which it was last changed */
byte right[(LAST + 1) * ROWS]; /* the same as it should be, in each version */
byte pins[PROCESSES * 2]; /* of each process, by the side of the copy */
byte taken[PROCESSES]; /* the version of the next forward of a process: of its dense weights, too */
byte inside[PROCESSES]; /* its threads that have a forward under way */
byte held[PROCESSES]; /* the version for which a process keeps its pin between forwards; 0: none */
bool locked[PROCESSES]; /* a thread of a process changes what it keeps */
bool dead[PROCESSES];
byte pairs = 1; /* of copies that were ever made */
bool keeper_dies;
byte deaths, kills, wholes;
bool keeper_is_done;

inline drop(who) {
  if
  :: held[who] != 0 -> pins[who * 2 + SIDE(copy_of[held[who]])]--; held[who] = 0
  :: else
  fi
}

proctype Thread(byte process) {
  byte own, copy, row;
  {
end:
    do
    :: /* The hook before the forward enters the gate, and a switch waits for those inside. */
       d_step { own = taken[process]; inside[process]++; copy = copy_of[own] };
       do
       :: constant[copy] -> break
       :: !constant[copy] && held[process] == own -> break /* since an earlier forward */
       :: !constant[copy] && held[process] != own ->
          atomic { !locked[process] -> locked[process] = true };
          if
          :: held[process] == own -> locked[process] = false; break
          :: else
          fi;
          pins[process * 2 + SIDE(copy)]++;
          if
          :: !CHECK || version[SIDE(copy)] == own ->
             d_step { drop(process); held[process] = own; locked[process] = false };
             break
          :: else ->
             /* A later version serves: the process changes to it. */
             d_step {
               assert(announced > own);
               pins[process * 2 + SIDE(copy)]--;
               locked[process] = false;
               inside[process]--
             };
             atomic {
               (inside[process] == 0 && !locked[process]) || taken[process] != own ->
               if
               :: taken[process] == own -> taken[process] = announced; drop(process)
               :: else
               fi;
               own = taken[process];
               inside[process]++;
               copy = copy_of[own]
             }
          fi
       od;
       do
       :: row < ROWS ->
          d_step {
            if
            :: cell[copy * ROWS + row] != right[own * ROWS + row] ->
               printf("a batch of version %d has row %d of version %d in place of %d\n", own, row,
                      cell[copy * ROWS + row], right[own * ROWS + row]);
               assert(false)
            :: else
            fi;
            row++
          }
       :: row == ROWS -> break
       od;
       atomic {
         inside[process]--;
         row = 0; own = 0; copy = 0
       }
    od
  }
  unless { dead[process] }
}

/* The thread of a process that follows: it has the next forward change the version, and lets go of
   a pin that no forward needs. It does so at any time here. */
proctype Follower(byte process) {
  byte away;
  {
end:
    do
    :: atomic {
         taken[process] != announced && inside[process] == 0 && !locked[process] ->
         taken[process] = announced;
         drop(process)
       }
    :: atomic {
         held[process] != 0 && !locked[process] ->
         locked[process] = true;
         away = held[process];
         held[process] = 0
       };
       d_step {
         if
         :: RESTORE && inside[process] != 0 -> held[process] = away
         :: else -> pins[process * 2 + SIDE(copy_of[away])]--
         fi;
         away = 0;
         locked[process] = false
       }
    od
  }
  unless { dead[process] }
}

proctype Keeper() {
  byte live, free, next, row, changed, process;
  byte pair = 0; /* the first one of the two copies that it has made, and can write to */
  byte source = NONE; /* what they were made from */
  byte dirty = 0; /* rows in which the free copy may differ from the one that serves */
  bool is_whole, gives_up;
again:
  {
    do
    :: announced == LAST -> break
    :: announced < LAST ->
       d_step {
         live = copy_of[announced];
         next = announced + 1
       };
       if
       :: wholes < WHOLE -> wholes++; is_whole = true
       :: true
       fi;
       if
       :: changed = 1
       :: changed = 2
       :: changed = ALL
       fi;
       if
       :: is_whole ->
          d_step { free = pairs * 2; pairs++; constant[free] = true; pair = NONE; dirty = ALL }
       :: !is_whole ->
          d_step {
            if
            :: pair == NONE || (live != pair && live != pair + 1 && live != source) ->
               pair = pairs * 2;
               pairs++;
               source = live;
               dirty = 0;
               for (row : 0 .. ROWS - 1) {
                 cell[pair * ROWS + row] = cell[live * ROWS + row];
                 cell[(pair + 1) * ROWS + row] = cell[live * ROWS + row]
               }
               row = 0;
               printf("two new copies\n")
            :: else
            fi;
            free = pair + (constant[live] -> 1 : 1 - SIDE(live))
          };
          if
          :: MARK -> version[SIDE(free)] = 0
          :: else
          fi;
          do
          :: process < PROCESSES ->
             if
             :: !AWAIT || pins[process * 2 + SIDE(free)] == 0 || (IDENTITY && dead[process]) ->
                process++
             :: DEADLINES && pins[process * 2 + SIDE(free)] != 0 -> gives_up = true; break
             fi
          :: else -> break
          od
       fi;
       if
       :: !gives_up ->
          dirty = (DIRTY || is_whole -> dirty | changed : dirty);
          do
          :: row < ROWS && (HAS(changed, row) || HAS(dirty, row)) ->
             d_step {
               cell[free * ROWS + row] =
                   (HAS(changed, row) -> next : cell[live * ROWS + row]);
               row++
             }
          :: row < ROWS && !HAS(changed, row) && !HAS(dirty, row) -> row++
          :: DEADLINES && row > 0 -> gives_up = true; break /* an exception */
          :: row == ROWS -> break
          od
       :: else
       fi;
       if
       :: !gives_up ->
          d_step {
            copy_of[next] = free;
            for (row : 0 .. ROWS - 1) {
              right[next * ROWS + row] =
                  (HAS(changed, row) -> next : right[announced * ROWS + row])
            }
            if
            :: !is_whole -> version[SIDE(free)] = next
            :: else
            fi;
            row = 0
          };
          if
          :: d_step { announced = next; printf("version %d serves\n", next) };
             /* What served until now is the free one, and lacks what has changed. */
             dirty = changed
          :: DEADLINES /* an exception */
          fi
       :: else
       fi;
       d_step {
         live = 0; free = 0; next = 0; row = 0; changed = 0; process = 0;
         is_whole = false; gives_up = false
       }
    od
  }
  unless {
    d_step {
      keeper_dies ->
      printf("the keeper dies\n");
      keeper_dies = false;
      pair = NONE; source = NONE; dirty = 0;
      live = 0; free = 0; next = 0; row = 0; changed = 0; process = 0;
      is_whole = false; gives_up = false
    };
    goto again
  };
  keeper_is_done = true
}

proctype Killer() {
  do
  :: d_step { deaths < DEATHS && !keeper_is_done -> deaths++; keeper_dies = true }
  :: d_step { kills < KILLS -> kills++; dead[0] = true; printf("process 0 dies\n") }
  :: break
  od
}

init {
  atomic {
    byte i, j;
    announced = FIRST;
    copy_of[FIRST] = 0;
    version[0] = FIRST;
    for (i : 0 .. ROWS - 1) {
      right[FIRST * ROWS + i] = FIRST;
      cell[i] = FIRST;
      cell[ROWS + i] = FIRST
    }
    for (i : 0 .. PROCESSES - 1) {
      taken[i] = FIRST;
      run Follower(i);
      for (j : 1 .. THREADS) {
        run Thread(i)
      }
    }
    run Keeper();
    run Killer()
  }
}
